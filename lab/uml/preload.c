// Preloaded into user-mode Linux.
//
// It stays on one processor: its kernel and its guest's processes take turns, and where the next one lies on another processor,
// each turn wakes that from sleep. Between two idle processors of a virtual machine everything takes several times as long.
//
// The rest is for processors whose extended state is larger than it knows of (AMX: 11,008 bytes). User-mode Linux 6.1 keeps 2,696
// bytes of a process's extended state. The host gives that much of it (PTRACE_GETREGSET copies as many bytes as are asked for), but
// takes back nothing that is shorter than the whole (PTRACE_SETREGSET fails with EFAULT), whereupon the guest's first process
// dies. The state that is missing is of units that no process of the guest has switched on: the header that comes back with the
// state says that they are in their initial state, and zeros are what that means.

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <elf.h>
#include <sched.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

// The one on which it was started: the host has chosen the idlest of those that it may use.
__attribute__((constructor)) static void stay(void) {
  cpu_set_t here;
  int processor = sched_getcpu();
  if (processor < 0 || processor >= CPU_SETSIZE)
    return;
  CPU_ZERO(&here);
  CPU_SET(processor, &here);
  // Slower where this is refused, and no less right.
  sched_setaffinity(0, sizeof here, &here);
}

#define MOST 65536

// Bytes of the whole state, as CPUID tells them; 0 where it does not.
static unsigned whole_size(void) {
  unsigned a, enabled, c, d;
  return __get_cpuid_count(0xd, 0, &a, &enabled, &c, &d) ? enabled : 0;
}

long ptrace(enum __ptrace_request request, ...) {
  static long (*next)(enum __ptrace_request, pid_t, void *, void *);
  // The tracer is one thread.
  static char whole[MOST] __attribute__((aligned(64)));
  va_list arguments;
  va_start(arguments, request);
  pid_t pid = va_arg(arguments, pid_t);
  void *address = va_arg(arguments, void *);
  void *data = va_arg(arguments, void *);
  va_end(arguments);
  if (!next)
    next = (long (*)(enum __ptrace_request, pid_t, void *, void *))dlsym(RTLD_NEXT, "ptrace");
  if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE)
    return next(request, pid, address, data);
  struct iovec *given = data;
  unsigned size = whole_size();
  if (given->iov_len >= size || size > MOST)
    return next(request, pid, address, data);
  memcpy(whole, given->iov_base, given->iov_len);
  memset(whole + given->iov_len, 0, size - given->iov_len);
  struct iovec padded = {whole, size};
  return next(request, pid, address, &padded);
}
