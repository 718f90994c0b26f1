// A program that knows nothing of Muster: reads torchrun's variables and passes a number around
// over TCP.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

int Variable(const char* name) {
  const char* const text = getenv(name);
  if (text == nullptr) {
    fprintf(stderr, "%s is not set\n", name);
    exit(2);
  }
  return atoi(text);
}

}  // namespace

int main() {
  const int rank = Variable("RANK");
  const int world_size = Variable("WORLD_SIZE");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(Variable("MASTER_PORT")));
  if (inet_pton(AF_INET, getenv("MASTER_ADDR"), &address.sin_addr) != 1) return 3;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (rank == 0) {
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        listen(fd, 16) != 0) {
      perror("rank 0 cannot listen");
      return 4;
    }
    int sum = 0;
    for (int i = 1; i < world_size; ++i) {
      const int peer = accept(fd, nullptr, nullptr);
      int value = 0;
      if (read(peer, &value, sizeof(value)) != sizeof(value)) return 5;
      sum += value;
      close(peer);
    }
    printf("sum of ranks %d\n", sum);
  } else {
    // Repeats until rank 0 listens.
    while (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    }
    if (write(fd, &rank, sizeof(rank)) != sizeof(rank)) return 6;
  }
  close(fd);
  return 0;
}
