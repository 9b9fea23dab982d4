// Tensors that say they are on "cuda" and live in the memory of the host, in a torch without CUDA. Every operator runs the
// kernel of the CPU over the same memory. Operators that mix devices are refused, as CUDA refuses them; what would make the
// host wait for the device is told to a function. Loaded before torch is imported: torch asks once what devices there are.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <cstring>
#include <set>

#include "blocks.h"
#include "clocks.h"

using at::Tensor;
using c10::IValue;

static thread_local c10::DeviceIndex current = 0;
static c10::DeviceIndex devices = 1;
static void (*told)(const char* op, const char* how, int64_t bytes) = nullptr;

static void tell(const char* op, const char* how, int64_t bytes = 0) {
  if (told != nullptr) told(op, how, bytes);
}

// — devices —

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override { auto before = getDevice(); setDevice(d); return before; }
  c10::Device getDevice() const override { return c10::Device(type(), current); }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d.index() < 0 ? c10::Device(type(), current) : d);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeStream(const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

namespace at {
struct ShadowHooks final : public CUDAHooksInterface {
  explicit ShadowHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { current = i; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { auto before = current; current = i; return before; }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  int getNumGPUs() const override { return devices; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ShadowHooks);
}  // namespace at

// — memory —

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    blocks::take(current, n);
    void* p = n ? c10::alloc_cpu(n) : nullptr;
    auto* block = new blocks::Block{c10::Storage(), p, n, current};
    return {p, block, &blocks::release, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
static Memory memory;

static void release(void* p) { delete static_cast<c10::Storage*>(p); }
static void release_block(void* p) {
  clocks::free(static_cast<blocks::Block*>(p)->kept.data());
  blocks::release(p);
}

// The same bytes as a storage of another device, which keeps the first alive. Those of the device count as taken from it.
static c10::Storage shared(const c10::Storage& s, c10::Device d, c10::Allocator* a) {
  auto size = s.nbytes();
  if (d.is_cuda()) {
    blocks::take(d.index(), size);
    auto* block = new blocks::Block{s, nullptr, size, d.index()};
    c10::DataPtr data(block->kept.mutable_data(), block, &release_block, d);
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data), a, true);
  }
  auto* keep = new c10::Storage(s);
  c10::DataPtr data(keep->mutable_data(), keep, &release, d);
  return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data), a, true);
}

static Tensor alias(const Tensor& t, c10::Storage s, c10::DispatchKey key) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(key), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

static Tensor host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return alias(t, shared(t.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU)), c10::DispatchKey::CPU);
}

static Tensor device(const Tensor& t) {
  clocks::fresh(t);
  return alias(t, shared(t.storage(), c10::Device(c10::kCUDA, current), &memory), c10::DispatchKey::CUDA);
}

// — pinned memory, from which copies run beside the host —

static std::mutex pins_lock;
static std::set<const void*> pins;

static void unpin(void* p) {
  { std::lock_guard<std::mutex> hold(pins_lock); pins.erase(p); }
  c10::free_cpu(p);
}

static bool is_pinned(const Tensor& t) {
  std::lock_guard<std::mutex> hold(pins_lock);
  return pins.count(t.storage().data()) > 0;
}

static Tensor pin(const Tensor& t) {
  size_t size = t.numel() * t.element_size();
  if (!size || t.is_cuda() || is_pinned(t)) return t;
  void* p = c10::alloc_cpu(size);
  { std::lock_guard<std::mutex> hold(pins_lock); pins.insert(p); }
  c10::DataPtr data(p, p, &unpin, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data), nullptr, false);
  auto dense = t.contiguous();
  auto made = alias(dense, std::move(storage), c10::DispatchKey::CPU);
  made.unsafeGetTensorImpl()->set_storage_offset(0);
  return made.copy_(dense);
}

// — operators that are not the CPU's —

struct On {  // another device, for a while
  c10::DeviceIndex before = current;
  explicit On(std::optional<at::Device> d) { if (d && d->index() >= 0) current = d->index(); }
  ~On() { current = before; }
};

using Sizes = c10::SymIntArrayRef;
#define INTS(x) C10_AS_INTARRAYREF_SLOW(x)

static at::TensorOptions on_host(std::optional<at::ScalarType> type, std::optional<at::Layout> layout) {
  return at::TensorOptions().dtype(type).layout(layout).device(at::kCPU);
}

static Tensor empty(Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                    std::optional<at::Device> d, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(d);
  return device(at::empty(INTS(size), on_host(type, layout), format));
}

static Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                            std::optional<at::Device> d, std::optional<bool>) {
  On on(d);
  return device(at::empty_strided(INTS(size), INTS(stride), on_host(type, layout)));
}

static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  clocks::start(clocks::current);
  if (from.is_cuda()) clocks::access(from, "aten::copy_", false, clocks::current);
  if (to.is_cuda()) clocks::access(to, "aten::copy_", true, clocks::current);
  if (from.is_cuda() && !to.is_cuda() && !non_blocking) clocks::merge(clocks::HOST, clocks::current);
  clocks::arrive(to.is_cuda() ? clocks::current : clocks::HOST);  // what is read here, or was waited for
  if (to.is_cuda() != from.is_cuda() && to.numel()) {
    auto how = !non_blocking ? "blocking" : is_pinned(from.is_cuda() ? to : from) ? "non_blocking" : "not pinned";
    tell(from.is_cuda() ? "copy to the host" : "copy to the device", how, from.nbytes());
  }
  if (from.is_cuda() && !to.is_cuda() && non_blocking && is_pinned(to) && from.dtype() == to.dtype())
    clocks::send(to, host(from), clocks::current);
  else
    host(to).copy_(host(from));
  return to;
}

static Tensor as_strided(const Tensor& t, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto r = alias(t, t.storage(), c10::DispatchKey::CUDA);
  auto at = offset ? offset->expect_int() : t.storage_offset();
  r.unsafeGetTensorImpl()->set_sizes_and_strides(INTS(size), INTS(stride), at);
  return r;
}

static Tensor view(const Tensor& t, Sizes size) {
  auto v = host(t).view(INTS(size));
  auto r = alias(t, t.storage(), c10::DispatchKey::CUDA);
  r.unsafeGetTensorImpl()->set_sizes_and_strides(v.sizes(), v.strides(), v.storage_offset());
  return r;
}

static Tensor& set_storage(Tensor& t, at::Storage s, c10::SymInt offset, Sizes size, Sizes stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(INTS(size), INTS(stride), offset.expect_int());
  return t;
}

static Tensor& set_tensor(Tensor& t, const Tensor& s) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(s.storage());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(s.sizes(), s.strides(), s.storage_offset());
  return t;
}

static void record_stream(Tensor&, at::Stream) {}  // what is recorded, Python says: streams are its own
static void recorded(const Tensor& t, int64_t stream) { clocks::record(t, int(stream)); }

static void resize(Tensor t, int64_t size) {  // of its storage, which the storages of Python do only where there is CUDA
  auto* s = t.storage().unsafeGetStorageImpl();
  auto fresh = memory.allocate(size);
  if (size && s->nbytes()) std::memcpy(fresh.get(), s->data(), std::min<size_t>(size, s->nbytes()));
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(size);
  clocks::fresh(t);
}

static void used(const Tensor& t, int64_t stream, bool write) { clocks::access(t, "a collective or a message", write, int(stream)); }

// — all others —

static const std::set<std::string> HOST_INDICES = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
                                                   "aten::_unsafe_index"};
static const std::set<std::string> WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount",
                                            "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::equal",
                                            "aten::repeat_interleave"};

struct Call {  // the arguments of an operator, lent to the CPU
  std::vector<std::pair<Tensor, Tensor>> pairs;
  bool on_device = false, on_host = false;
  std::string which;

  Tensor in(const Tensor& t, const std::string& op, const c10::AliasInfo* how) {
    if (!t.defined()) return t;
    if (t.is_cuda()) {
      on_device = true;
      if (how == nullptr || how->isWrite()) clocks::access(t, op, how != nullptr, clocks::current);
      pairs.emplace_back(t, host(t));
      return pairs.back().second;
    }
    if (t.dim() > 0) { on_host = true; which = c10::str(t.sizes()); }
    return t;
  }
  void in(IValue& v, const std::string& op, const c10::AliasInfo* how) {
    if (v.isTensor()) v = in(v.toTensor(), op, how);
    else if (v.isTensorList()) {
      c10::List<Tensor> lent;
      for (auto& t : v.toTensorVector()) lent.push_back(in(t, op, how));
      v = IValue(lent);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> lent;
      for (auto& t : v.toOptionalTensorVector()) lent.push_back(t ? std::optional<Tensor>(in(*t, op, how)) : std::nullopt);
      v = IValue(lent);
    } else if (v.isDevice() && v.toDevice().is_cuda()) v = IValue(c10::Device(c10::kCPU));
  }
  Tensor out(const Tensor& t) const {
    if (!t.defined() || !on_device) return t;
    for (auto& [own, lent] : pairs)
      if (lent.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return own;
    for (auto& [own, lent] : pairs)
      if (t.storage().data() && lent.storage().data() == t.storage().data()) return alias(t, own.storage(), c10::DispatchKey::CUDA);
    auto made = device(t);
    clocks::access(made, "what made it", true, clocks::current);
    return made;
  }
  void out(IValue& v) const {
    if (v.isTensor()) v = out(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<Tensor> own;
      for (auto& t : v.toTensorVector()) own.push_back(out(t));
      v = IValue(own);
    }
  }
  void written() const {  // also where the operator gave them other shapes, or more memory
    for (auto& [own, lent] : pairs) {
      auto* impl = own.unsafeGetTensorImpl();
      if (lent.storage().data() != own.storage().data() || lent.storage().nbytes() != own.storage().nbytes()) {
        auto moved = shared(lent.storage(), own.device(), &memory);
        auto* s = own.storage().unsafeGetStorageImpl();
        s->set_nbytes(moved.nbytes());
        s->set_data_ptr_noswap(std::move(const_cast<c10::DataPtr&>(moved.mutable_data_ptr())));
      }
      if (lent.sizes() != own.sizes() || lent.strides() != own.strides() || lent.storage_offset() != own.storage_offset())
        impl->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
    }
  }
};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto given = schema.arguments().size(), back = schema.returns().size();
  Call call;
  clocks::start(clocks::current);
  for (size_t i = 0; i < given; i++) call.in((*stack)[stack->size() - given + i], name, schema.arguments()[i].alias_info());
  TORCH_CHECK(!(call.on_device && call.on_host) || HOST_INDICES.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(current), " and cpu! (",
              name, ", of which a tensor of shape ", call.which, " is on the host)");
  bool sized = name == "aten::repeat_interleave" && !stack->back().isNone();  // the host knows the size of the result
  if (call.on_device && WAITS.count(name) && !sized) {
    clocks::merge(clocks::HOST, clocks::current);
    tell(name.c_str(), "");
  }
  if (call.on_device && name.find("index_put") != std::string::npos && stack->end()[2 - int64_t(given)].toTensor().numel() != 1)
    for (size_t i = 1; i < call.pairs.size(); i++)  // of one value, it fills by the mask
      if (call.pairs[i].first.scalar_type() == at::kBool) { tell("index by a mask", ""); break; }
  On on(call.pairs.empty() ? std::nullopt : std::optional<at::Device>(call.pairs.front().first.device()));
  op.callBoxed(stack);
  call.written();
  for (size_t i = stack->size() - back; i < stack->size(); i++) call.out((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY(shadow, m) {
  m.def("host(Tensor t) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &host));
  m.def("used(Tensor t, int stream, bool write) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &used));
  m.def("recorded(Tensor t, int stream) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &recorded));
  m.def("pin(Tensor t) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &pin));
  m.def("is_pinned(Tensor t) -> bool", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &is_pinned));
  m.def("resize(Tensor t, int size) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &resize));
}

extern "C" {
void shadow_put(int count) {
  devices = static_cast<c10::DeviceIndex>(count);
  c10::SetAllocator(c10::kCUDA, &memory, 1);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(new Guard());
}
void shadow_set_device(int i) { current = static_cast<c10::DeviceIndex>(i); }
int shadow_current_device() { return current; }
void shadow_tell(void (*f)(const char*, const char*, int64_t)) { told = f; }
}
