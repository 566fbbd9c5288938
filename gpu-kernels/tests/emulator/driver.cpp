// A stand-in for the CUDA driver (libcuda.so.1): as much of its interface as flexcomm calls, with the emulator for a GPU and
// the host's memory for the device's. It runs whole processes as they would on a GPU, from looking for the driver to the
// launch on the caller's stream; modules are taken as they are and not looked at, kernels are those that the emulator has.
//
//   g++ -std=c++17 -O2 -shared -fPIC -DFLEXCOMM_EMULATOR -I ../../cuda -I . driver.cpp -o somewhere/libcuda.so.1
//   LD_LIBRARY_PATH=somewhere ...
//
// STANDIN_COMPILES must be set where NVRTC compiles, and not where torch looks for devices: fill the cache of kernels first.
// What it has seen can be asked of it (standin_*), and it can be told to refuse a kernel. STANDIN_VERSION is the CUDA version
// that it says it is for, as 13020.
#include "emulator.cpp"

#include <functional>
#include <mutex>

namespace standin {

static std::mutex turn;
static thread_local void* current = nullptr;
static int context[2], module;
static std::map<u64, u64> launches;  // by stream
static std::string refused;

// What a stream has captured: nothing of it runs before the graph is launched.
using Graph = std::vector<std::function<int()>>;
static std::map<void*, Graph*> captures;
static void* const STREAM = &context[1];
static u64 clock_now;
struct Event { u64 at; };

// Runs work now, or keeps it where the stream captures.
template <typename F> int queue(void* stream, F work) {
  auto capturing = captures.find(stream);
  if (capturing == captures.end()) return work();
  capturing->second->push_back(work);
  return 0;
}

enum { SUCCESS = 0, INVALID = 1, NOT_FOUND = 500, FAILED = 719, CAPTURING = 900 };

}  // namespace standin

using namespace standin;
#define API extern "C" __attribute__((visibility("default"))) int

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* version) {
  const char* said = std::getenv("STANDIN_VERSION");
  *version = said ? std::atoi(said) : 13020;
  return SUCCESS;
}
API cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
API cuDeviceGet(int* device, int) { return *device = 0, SUCCESS; }
API cuDeviceGetAttribute(int* value, int what, int) {
  // Multiprocessors, and the compute capability of an H100; nothing else is asked for.
  *value = what == 16 ? 3 : what == 75 ? 9 : 0;
  return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** to, int) { return *to = &context[0], SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxGetCurrent(void** to) { return *to = current, SUCCESS; }
API cuCtxSetCurrent(void* to) { return current = to, SUCCESS; }
API cuCtxSynchronize() { return current ? SUCCESS : INVALID; }
API cuModuleLoadData(void** to, const void* image) {
  // A cubin is an ELF file.
  if (std::memcmp(image, "\177ELF", 4) != 0) return INVALID;
  return *to = &module, SUCCESS;
}
API cuModuleUnload(void*) { return SUCCESS; }
API cuModuleGetFunction(void** to, void*, const char* name) {
  auto found = kernels().find(name);
  if (found == kernels().end()) return NOT_FOUND;
  *to = const_cast<void*>(static_cast<const void*>(&*found));
  return SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 2, SUCCESS; }
API cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  auto* kernel = static_cast<const std::pair<const std::string, emulator::Entry>*>(function);
  std::lock_guard<std::mutex> own(turn);
  if (!current) return INVALID;
  if (kernel->first == refused) return FAILED;
  // Every argument is a word, which the driver copies.
  std::vector<u64> words;
  for (u32 i = 0; i < kernel->second.parameters; i++) words.push_back(*static_cast<u64*>(arguments[i]));
  return queue(stream, [=]() mutable {
    const u64 seen = ++launches[reinterpret_cast<u64>(stream)];
    clock_now += 1000;
    std::vector<void*> pointers;
    for (u64& word : words) pointers.push_back(&word);
    const u32 count = (u32)pointers.size();
    return emulate(kernel->first.c_str(), grid, threads, pointers.data(), count, seen, 2) == 0 ? SUCCESS : INVALID;
  });
}
// Strict: what a driver says to copies of nothing is not documented.
API cuMemsetD8Async(u64 at, unsigned char value, size_t bytes, void* stream) {
  if (bytes == 0) return INVALID;
  return queue(stream, [=] { return std::memset(reinterpret_cast<void*>(at), value, bytes), SUCCESS; });
}
API cuMemcpyAsync(u64 to, u64 from, size_t bytes, void* stream) {
  if (bytes == 0) return INVALID;
  return queue(stream, [=] {
    clock_now += 1000 + bytes;
    return std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), SUCCESS;
  });
}
API cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return INVALID;
  if (captures.count(stream)) return CAPTURING;
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void* stream) {
  if (bytes == 0) return INVALID;
  if (captures.count(stream)) return CAPTURING;
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), SUCCESS;
}
API cuStreamSynchronize(void* stream) { return captures.count(stream) ? CAPTURING : SUCCESS; }
API cuDeviceGetName(char* to, int length, int) { return std::snprintf(to, (size_t)length, "stand-in"), SUCCESS; }
API cuMemAlloc_v2(u64* to, size_t bytes) {
  if (!captures.empty()) return CAPTURING;
  return *to = reinterpret_cast<u64>(std::aligned_alloc(512, (bytes + 511) / 512 * 512)), *to ? SUCCESS : INVALID;
}
API cuMemFree_v2(u64 at) { return std::free(reinterpret_cast<void*>(at)), SUCCESS; }
API cuMemGetInfo_v2(size_t* free, size_t* whole) { return *free = *whole = 1ull << 34, SUCCESS; }
API cuMemcpyHtoD_v2(u64 to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), SUCCESS;
}
API cuMemcpyDtoH_v2(void* to, u64 from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), SUCCESS;
}
API cuStreamCreate(void** to, unsigned) { return *to = STREAM, SUCCESS; }
API cuStreamDestroy_v2(void*) { return SUCCESS; }
// Events tell a time that only launches and copies move, these by their bytes. There is no cuEventElapsedTime_v2: drivers before CUDA 12.8 have none.
API cuEventCreate(void** to, unsigned) { return *to = new Event{0}, SUCCESS; }
API cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), SUCCESS; }
API cuEventRecord(void* event, void*) { return static_cast<Event*>(event)->at = clock_now, SUCCESS; }
API cuEventSynchronize(void*) { return SUCCESS; }
API cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  *milliseconds = 1e-6f * (float)(static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at);
  return SUCCESS;
}
API cuStreamBeginCapture_v2(void* stream, int) {
  if (captures.count(stream)) return INVALID;
  return captures[stream] = new Graph, SUCCESS;
}
API cuStreamEndCapture(void* stream, void** to) {
  auto capturing = captures.find(stream);
  if (capturing == captures.end()) return INVALID;
  *to = capturing->second;
  return captures.erase(capturing), SUCCESS;
}
API cuGraphInstantiateWithFlags(void** to, void* graph, u64) { return *to = new Graph(*static_cast<Graph*>(graph)), SUCCESS; }
API cuGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), SUCCESS; }
API cuGraphExecDestroy(void* graph) { return delete static_cast<Graph*>(graph), SUCCESS; }
API cuGraphLaunch(void* graph, void*) {
  std::lock_guard<std::mutex> own(turn);
  for (auto& work : *static_cast<Graph*>(graph))
    if (int status = work()) return status;
  return SUCCESS;
}
API cuPointerGetAttribute(void* to, int, u64) { return *static_cast<int*>(to) = 0, SUCCESS; }
// NVRTC asks for one when it compiles, and needs it: its first word is its size, too short to hold anything. CUDA's runtime,
// which torch asks for devices, must not have one: it then says that there are none.
API cuGetExportTable(const void** to, const void*) {
  static const u64 table[1] = {sizeof table};
  const bool wanted = std::getenv("STANDIN_COMPILES") != nullptr;
  return *to = wanted ? table : nullptr, wanted ? SUCCESS : NOT_FOUND;
}
API cuGetErrorName(int error, const char** name) {
  *name = error == FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : error == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_INVALID_VALUE";
  return SUCCESS;
}
API cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }

// Kernels launched on a stream so far, and on all.
extern "C" u64 standin_launches(u64 stream) { return launches[stream]; }
extern "C" u64 standin_all() {
  u64 sum = 0;
  for (auto& one : launches) sum += one.second;
  return sum;
}
// Launches of this kernel fail from now on; an empty name ends it.
extern "C" void standin_refuse(const char* name) { refused = name; }
