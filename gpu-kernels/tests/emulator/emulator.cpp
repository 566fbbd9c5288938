// The kernels, compiled for the emulator, and how tests start them.
#include "kernels.hpp"

#include <map>
#include <string>

#if defined(__x86_64__)
// Saves what a call must keep, on this stack, and goes on with the other.
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

namespace emulator {

float half_to_float(u16 bits) {
  u32 sign = (u32)(bits >> 15) << 31, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

u16 float_to_half(float value) {
  u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return (u16)(sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u));
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24: adding 0.5 in f32 rounds to these, ties to even.
    float shifted = __uint_as_float(magnitude) + 0.5f;
    return (u16)(sign | (__float_as_uint(shifted) - 0x3f000000u));
  }
  u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return (u16)(sign | (rounded - 0x38000000u) >> 13);
}

static const size_t STACK_WORDS = 4096;

static void enter() {
  run.call(run.context);
  run.current->done = true;
  suspend();
  std::abort();
}

static void prepare(Fiber* fiber) {
  if (!fiber->stack) fiber->stack.reset(new u64[STACK_WORDS]);
  u64* top = fiber->stack.get() + STACK_WORDS;
  top = reinterpret_cast<u64*>(reinterpret_cast<uintptr_t>(top) & ~(uintptr_t)63);
#if defined(__x86_64__)
  top -= 8;  // six registers, where to go on, and a place for where to return to, which nothing does
  std::memset(top, 0, 64);
  top[6] = reinterpret_cast<u64>(&enter);
#else
  top -= 20;
  std::memset(top, 0, 160);
  top[11] = reinterpret_cast<u64>(&enter);
#endif
  fiber->stack_pointer = top;
  fiber->done = false;
}

static std::vector<Fiber*> spare;

static void start(Block* block, u32 index, u32 threads) {
  block->index = index;
  block->alive = threads;
  for (u32 thread = 0; thread < threads; thread++) {
    Fiber* fiber;
    if (spare.empty()) {
      fiber = new Fiber;
    } else {
      fiber = spare.back();
      spare.pop_back();
    }
    fiber->block = block;
    fiber->thread = thread;
    prepare(fiber);
    block->fibers.push_back(fiber);
    run.ready.push_back(fiber);
  }
}

static void step() {
  u32 at = draw((u32)run.ready.size());
  Fiber* fiber = run.ready[at];
  run.ready[at] = run.ready.back();
  run.ready.pop_back();
  run.current = fiber;
  threadIdx.x = fiber->thread;
  blockIdx.x = fiber->block->index;
  emulator_switch(&run.scheduler, fiber->stack_pointer);
}

// All blocks, `resident` of them at a time.
static void grid(u32 blocks, u32 threads, u32 resident) {
  gridDim.x = blocks;
  blockDim.x = threads;
  std::vector<u32> order(blocks);
  for (u32 i = 0; i < blocks; i++) order[i] = i;
  for (u32 i = blocks; i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
  std::vector<std::unique_ptr<Block>> active;
  while (!order.empty() || !active.empty()) {
    while (!order.empty() && active.size() < resident) {
      active.emplace_back(new Block);
      start(active.back().get(), order.back(), threads);
      order.pop_back();
    }
    if (run.ready.empty()) fail("every thread waits");
    step();
    Fiber* fiber = run.current;
    if (!fiber->done) continue;
    Block* block = fiber->block;
    if (!block->waiting.empty()) fail("a thread returned while others wait at a barrier");
    if (--block->alive > 0) continue;
    spare.insert(spare.end(), block->fibers.begin(), block->fibers.end());
    for (auto& one : active)
      if (one.get() == block) {
        std::swap(one, active.back());
        break;
      }
    active.pop_back();
  }
}

template <typename... A, size_t... I>
void invoke(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(arguments[I])...);
}

struct Call {
  void (*with)(void*, void**);
  void* kernel;
  void** arguments;
};
template <typename... A> void with(void* kernel, void** arguments) {
  invoke(reinterpret_cast<void (*)(A...)>(kernel), arguments, std::index_sequence_for<A...>());
}
struct Entry {
  void (*with)(void*, void**);
  void* kernel;
  u32 parameters;
};
template <typename... A> Entry entry(void (*kernel)(A...)) {
  return {&with<A...>, reinterpret_cast<void*>(kernel), (u32)sizeof...(A)};
}

}  // namespace emulator

#define KERNEL(name) {#name, emulator::entry(&name)},
static const std::map<std::string, emulator::Entry>& kernels() {
  static const std::map<std::string, emulator::Entry> all = {KERNELS};
  return all;
}

// 0; 1 for an unknown kernel, 2 for another number of arguments.
extern "C" int emulate(const char* name, u32 blocks, u32 threads, void** arguments, u32 count, u64 seed, u32 resident) {
  auto found = kernels().find(name);
  if (found == kernels().end()) return 1;
  if (found->second.parameters != count) return 2;
  emulator::Call call = {found->second.with, found->second.kernel, arguments};
  emulator::run.random = seed * 0x9e3779b97f4a7c15ull | 1;
  emulator::run.context = &call;
  emulator::run.call = [](void* context) {
    auto* call = static_cast<emulator::Call*>(context);
    call->with(call->kernel, call->arguments);
  };
  emulator::run.atomics.clear();
  emulator::grid(blocks, threads, resident);
  return 0;
}

// Of the last run, on one word of the device's memory.
extern "C" u32 emulator_most_atomics() {
  u32 most = 0;
  for (const auto& word : emulator::run.atomics) most = word.second > most ? word.second : most;
  return most;
}

// Sizes of the structures that the host lays out.
extern "C" void emulator_sizes(u64* sizes) {
  sizes[0] = sizeof(Outcome);
  sizes[1] = sizeof(State);
  sizes[2] = sizeof(Partials);
  sizes[3] = MOST_BLOCKS;
  sizes[4] = TILE;
}
