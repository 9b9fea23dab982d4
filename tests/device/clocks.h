// Which work on a device is known to be over before other work begins: a clock for each stream, of what it knows of all others. A tensor
// that a stream reads, while another has written it and nobody has waited for that, is a race; so is one that it writes meanwhile.
#pragma once
#include <ATen/ATen.h>
#include <array>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

namespace clocks {
constexpr int STREAMS = 64, HOST = 63, COMMUNICATORS = 32;
using Clock = std::array<int64_t, STREAMS>;
struct Access {
  int64_t begin, end;  // bytes of the storage
  int stream;
  int64_t tick;
  bool write;
  std::string op;
};

static bool watching = false;
static thread_local int current = 0;
static std::mutex lock;
static std::array<Clock, STREAMS> known{};
static std::vector<Clock> events;
static std::unordered_map<const void*, std::vector<Access>> accesses;  // by the memory of a storage

static void learn(Clock& to, const Clock& from) {
  for (int i = 0; i < STREAMS; i++) to[i] = std::max(to[i], from[i]);
}

static void start(int stream) {  // an operation begins: after all that the host knew when it asked for it
  std::lock_guard<std::mutex> hold(lock);
  learn(known[stream], known[HOST]);
  known[stream][stream]++;
}

static void merge(int to, int from) {
  std::lock_guard<std::mutex> hold(lock);
  learn(known[to], known[from]);
}

static std::unordered_map<const void*, int> owners;  // the stream that memory was allocated on
static std::set<std::pair<const void*, int>> recorded;  // by record_stream: memory, and who else uses it
static std::array<std::vector<Access>, STREAMS> given_back;  // by the stream it was allocated on: who else used it
static std::string freed;

static std::string named(int stream) { return stream == 0 ? "the default stream" : c10::str("stream ", stream); }

static void fresh(const at::Tensor& t) {  // other memory, also where some lay at the same place before
  if (!watching) return;
  std::lock_guard<std::mutex> hold(lock);
  accesses.erase(t.storage().data());
  owners[t.storage().data()] = current;
  for (auto& a : given_back[current])
    if (known[current][a.stream] < a.tick && known[HOST][a.stream] < a.tick && freed.empty())
      freed = c10::str("memory of ", named(current), " is freed, and may be used again, while ", a.op, a.write ? " writes" : " reads",
                       " it on ", named(a.stream), ", without record_stream: nobody has waited for that");
  given_back[current].clear();
}

// CUDA's allocator gives memory back to the stream that it was allocated on, where the next tensor may lie in it. (What a
// communicator has, its work keeps until it was waited for.)
static void free(const void* memory) {
  std::lock_guard<std::mutex> hold(lock);
  auto at = owners.find(memory);
  if (!watching || at == owners.end()) return;
  for (auto& a : accesses[memory])
    if (a.stream != at->second && a.stream < COMMUNICATORS && !recorded.count({memory, a.stream})) given_back[at->second].push_back(a);
  accesses.erase(memory);
  owners.erase(at);
  for (auto r = recorded.lower_bound({memory, 0}); r != recorded.end() && r->first == memory;) r = recorded.erase(r);
}

static void record(const at::Tensor& t, int stream) {
  std::lock_guard<std::mutex> hold(lock);
  recorded.insert({t.storage().data(), stream});
}

static void access(const at::Tensor& t, const std::string& op, bool write, int stream) {
  const void* memory = t.defined() ? t.storage().data() : nullptr;
  if (!watching || memory == nullptr || t.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  auto size = static_cast<int64_t>(t.element_size()), begin = t.storage_offset() * size, end = begin + (last + 1) * size;
  std::string race;
  {
    std::lock_guard<std::mutex> hold(lock);
    auto& before = accesses[memory];
    std::vector<Access> kept;
    for (auto& a : before) {
      bool apart = a.end <= begin || end <= a.begin, over = known[stream][a.stream] >= a.tick;
      if (!apart && !over && (write || a.write))
        race = c10::str(op, write ? " writes" : " reads", " a tensor of shape ", t.sizes(), " on ", named(stream), " while ", a.op,
                        a.write ? " writes" : " reads", " it on ", named(a.stream), ": nobody has waited for that");
      bool covered = begin <= a.begin && a.end <= end;
      if (!(covered && over && (write || (!a.write && a.stream == stream)))) kept.push_back(a);
    }
    kept.push_back({begin, end, stream, known[stream][stream], write, op});
    before = std::move(kept);
  }
  TORCH_CHECK(race.empty(), "a race between streams: ", race);
}
// Numbers on their way to pinned memory of the host, where nonsense is until somebody has waited for them.
struct Arrival {
  at::Tensor to, numbers;
  int stream;
  int64_t tick;
};
static std::vector<Arrival> arrivals;

static void send(const at::Tensor& to, const at::Tensor& numbers, int stream) {
  if (to.is_contiguous()) std::memset(to.data_ptr(), 0xff, to.nbytes());
  std::lock_guard<std::mutex> hold(lock);
  arrivals.push_back({to, numbers.clone(), stream, known[stream][stream]});
}

static void arrive(int at) {  // what a stream, or the host, has waited for is there
  std::vector<Arrival> there, rest;
  {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& a : arrivals) (known[at][a.stream] >= a.tick ? there : rest).push_back(a);
    arrivals = std::move(rest);
  }
  for (auto& a : there) a.to.copy_(a.numbers);
}
}  // namespace clocks

extern "C" {
const char* clocks_freed() {  // what was freed too early, once
  static thread_local std::string told;
  std::lock_guard<std::mutex> hold(clocks::lock);
  told.swap(clocks::freed);
  clocks::freed.clear();
  return told.c_str();
}
void clocks_watch(int on) { clocks::watching = on; }
void clocks_use(int stream) { clocks::current = stream; }
int clocks_current() { return clocks::current; }
void clocks_merge(int to, int from) {
  clocks::merge(to, from);
  if (to == clocks::HOST) clocks::arrive(to);
}
void clocks_start(int stream) { clocks::start(stream); }
int64_t clocks_record(int stream) {
  std::lock_guard<std::mutex> hold(clocks::lock);
  clocks::events.push_back(clocks::known[stream]);
  return static_cast<int64_t>(clocks::events.size()) - 1;
}
int clocks_over(int64_t event) {  // whether the host has waited for it
  std::lock_guard<std::mutex> hold(clocks::lock);
  for (int i = 0; i < clocks::STREAMS; i++)
    if (i != clocks::HOST && clocks::known[clocks::HOST][i] < clocks::events[event][i]) return 0;
  return 1;
}
void clocks_wait(int stream, int64_t event) {
  {
    std::lock_guard<std::mutex> hold(clocks::lock);
    clocks::learn(clocks::known[stream], clocks::events[event]);
  }
  if (stream == clocks::HOST) clocks::arrive(stream);
}
}
