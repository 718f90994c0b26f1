// What ThreadSanitizer must not report. gRPC's templates are compiled into our (instrumented) code,
// but the queues that hand a call from one gRPC thread to another, and the shutdown that waits for
// all calls, are in Debian's library, which is not instrumented: TSan cannot see that they order
// these accesses. Named are places that call none of our code, never whole namespaces, because our
// own handlers run below gRPC's frames.
#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_suppressions() {
  return "race_top:^grpc::\n"
         "race_top:^std::__atomic_base<grpc::Server\n"
         // Its queue of closures, whose moves the linker takes from our copy of Abseil's templates.
         "race:grpc_event_engine::experimental::ThreadPool::Queue::\n"
         // Reference counts, operation sets and tags of calls.
         "race:grpc::internal::ServerCallbackCall::Ref\n"
         "race:grpc::internal::ServerCallbackCall::Unref\n"
         "race:grpc::internal::CallbackWithStatusTag::CallbackWithStatusTag\n"
         // Copies the callback of a call, with what it captured.
         "race:grpc::internal::CallbackUnaryCallImpl<\n"
         "race:grpc::internal::CallbackWithSuccessTag::Set\n"
         "race:grpc::internal::CallbackWithSuccessTag::CallbackWithSuccessTag\n"
         "race:grpc::internal::CallbackWithSuccessTag::~CallbackWithSuccessTag\n"
         "race:grpc::internal::CallbackWithSuccessTag::Clear\n"
         "race:grpc::internal::CallOpSet<\n"
         "race:grpc::internal::InterceptorBatchMethodsImpl::\n"
         // What a reactor holds until gRPC binds it to its call, and the binding.
         "race:grpc::Server*Reactor*::PreBindBacklog::\n"
         "race:grpc::Server*Reactor*::InternalBind\n"
         // Constructors and destructors of calls, services and messages.
         "race:Impl::ServerCallback*Impl(\n"
         "race:Impl::ClientCallback*Impl(\n"
         "race:Handler<*>::Deserialize\n"
         // A call's messages, and the count of its callbacks that its constructor begins.
         "race:grpc::internal::DefaultMessageHolder<*>::~DefaultMessageHolder\n"
         "race_top:^std::__atomic_base<long>::__atomic_base\n"
         // How a call that is over asks for the next one, and the functions that its tags hold.
         "race:CallbackCallTag::ContinueRunAfterInterception*lambda\n"
         "race_top:^std::_Function_base::_M_empty\n"
         "race_top:^std::function<void ()>::function\n"
         "race_top:^std::function<void (bool)>::operator()\n"
         "race_top:^std::function<grpc::\n"
         "race_top:::WithCallbackMethod_\n"
         // The relay's own call (agent/relay.cc) is let go when gRPC says that it is over,
         // on a thread other than those that gRPC called it on before.
         "race_top:^~Call$\n"
         "race:::~WithCallbackMethod_\n";
}
#endif
