// What is allocated on a pretended device, counted as CUDA's caching allocator counts: what was asked for, in blocks of 512 bytes,
// out of segments of 2 MiB that it keeps until somebody empties its cache. A device may have a size: what does not fit is an error.
#pragma once
#include <c10/core/Storage.h>
#include <c10/core/impl/alloc_cpu.h>
#include <array>
#include <mutex>

namespace blocks {
constexpr int64_t BLOCK = 512, SEGMENT = 2 << 20;
struct Counts {
  int64_t requested = 0, allocated = 0, reserved = 0;
};
struct Device {
  Counts now, peak;
  int64_t retries = 0, failures = 0, size = int64_t(1) << 36, beside = 0;  // bytes that others have of it
};
struct Block {
  c10::Storage kept;
  void* own;
  size_t size;
  c10::DeviceIndex device;
};

static std::mutex lock;
static std::array<Device, 64> devices{};

static int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static void take(c10::DeviceIndex index, size_t n) {
  std::lock_guard<std::mutex> hold(lock);
  auto& d = devices[index < 0 ? 0 : index];
  auto block = up(int64_t(n), BLOCK), wanted = std::max(d.now.reserved, up(d.now.allocated + block, SEGMENT));
  if (wanted > d.size - d.beside) {  // give back what is kept, and try again
    d.retries++;
    d.now.reserved = up(d.now.allocated, SEGMENT);
    if (up(d.now.allocated + block, SEGMENT) > d.size - d.beside) {
      d.failures++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", n / 1048576.0, " MiB. GPU ", int(index),
                       " has a total capacity of ", d.size / 1048576.0, " MiB");
    }
    wanted = up(d.now.allocated + block, SEGMENT);
  }
  d.now = {d.now.requested + int64_t(n), d.now.allocated + block, wanted};
  d.peak = {std::max(d.peak.requested, d.now.requested), std::max(d.peak.allocated, d.now.allocated),
            std::max(d.peak.reserved, d.now.reserved)};
}

static void release(void* p) {
  auto* block = static_cast<Block*>(p);
  {
    std::lock_guard<std::mutex> hold(lock);
    auto& d = devices[block->device < 0 ? 0 : block->device];
    d.now.requested -= int64_t(block->size);
    d.now.allocated -= up(int64_t(block->size), BLOCK);
  }
  if (block->own != nullptr) c10::free_cpu(block->own);
  delete block;
}
}  // namespace blocks

extern "C" {
// The counts now and at their peaks, retries, failures, size, and what others have.
void blocks_read(int device, int64_t* out) {
  std::lock_guard<std::mutex> hold(blocks::lock);
  auto& d = blocks::devices[device];
  int64_t found[] = {d.now.requested, d.now.allocated, d.now.reserved, d.peak.requested, d.peak.allocated,
                     d.peak.reserved, d.retries, d.failures, d.size, d.beside};
  std::copy(std::begin(found), std::end(found), out);
}
void blocks_reset_peak(int device) {
  std::lock_guard<std::mutex> hold(blocks::lock);
  blocks::devices[device].peak = blocks::devices[device].now;
}
void blocks_empty_cache() {
  std::lock_guard<std::mutex> hold(blocks::lock);
  for (auto& d : blocks::devices) d.now.reserved = blocks::up(d.now.allocated, blocks::SEGMENT);
}
void blocks_size(int device, int64_t size, int64_t beside) {
  std::lock_guard<std::mutex> hold(blocks::lock);
  blocks::devices[device].size = size;
  blocks::devices[device].beside = beside;
}
}
