// A pretended accelerator: memory of the host under the name of another device (PrivateUse1).
//
// Every operator runs by the CPU's kernel on the same bytes. What differs from the CPU is what a
// GPU would do differently: tensors of two devices do not mix; a read by the host is counted as a
// wait; a non-blocking copy to the host arrives only when somebody waits (till then: poison);
// a device has its own generator, its own count of bytes and a limit to them.
#include <torch/extension.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {
constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr int kMax = 16;
int n_devices = 2;
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMax> current_stream{};
std::atomic<int64_t> next_stream{1}, clock_now{1};
std::recursive_mutex mutex_;
std::map<std::string, int64_t> waits;            // reads by the host, by operator
std::map<std::string, int64_t> calls;
int on_wait = 0; bool strict = false;  // strict: copies to pageable memory too arrive late (as on MPS)
// What this device cannot do, as MPS has no float64 and no streams of one's own.
std::atomic<bool> used{false};                    // a device was chosen, or has memory
bool no_float64 = false, no_pinned = false, no_streams = false, no_scaler = false;
void check_type(c10::ScalarType type) {
  TORCH_CHECK_TYPE(!no_float64 || (type != c10::kDouble && type != c10::kComplexDouble), "fake device: there is no float64");
}
struct Memory { int64_t now = 0, peak = 0, total = 0, limit = 1LL << 40; };
std::array<Memory, kMax> memory_;
std::deque<std::function<void()>> pending;        // copies to the host that have not arrived

void arrive() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  while (!pending.empty()) { auto f = pending.front(); pending.pop_front(); f(); }
}
void waited(const std::string& op) {
  { std::lock_guard<std::recursive_mutex> lock(mutex_); waits[op]++; }
  TORCH_CHECK(on_wait == 0, "fake device: the host waits in ", op);
  arrive();
}

// ---- memory
struct Block { void* p; size_t n; c10::DeviceIndex d; };
void free_block(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  memory_[b->d].now -= b->n;
  std::free(b->p);
  delete b;
}
struct Alloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    auto& m = memory_[current];
    TORCH_CHECK_WITH(OutOfMemoryError, m.now + (int64_t)n <= m.limit, "fake device out of memory. Tried to allocate ", n,
                " bytes, ", m.now, " of ", m.limit, " are in use.");
    void* p = n ? std::aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    m.now += n; m.total += n; m.peak = std::max(m.peak, m.now);
    auto* b = new Block{p, n, current};
    return {p, b, &free_block, c10::Device(kDev, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    for (auto* a : {&s.allocated_bytes, &s.reserved_bytes}) {
      (*a)[0].current = memory_[i].now; (*a)[0].peak = memory_[i].peak;
      (*a)[0].allocated = memory_[i].total; (*a)[0].freed = memory_[i].total - memory_[i].now;
    }
    return s;
  }
  void resetAccumulatedStats(c10::DeviceIndex i) override { memory_[i].total = memory_[i].now; }
  void resetPeakStats(c10::DeviceIndex i) override { memory_[i].peak = memory_[i].now; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override {
    return {memory_[i].limit - memory_[i].now, memory_[i].limit};
  }
};
Alloc alloc;
REGISTER_ALLOCATOR(kDev, &alloc);

std::map<char*, size_t> pinned;
struct PinnedAlloc final : c10::Allocator {
  static void drop(void* p) { std::lock_guard<std::recursive_mutex> l(mutex_); arrive(); pinned.erase((char*)p); std::free(p); }
  c10::DataPtr allocate(size_t n) override {
    TORCH_CHECK(!no_pinned, "fake device: there is no pinned memory");
    void* p = std::aligned_alloc(64, (std::max<size_t>(n, 1) + 63) / 64 * 64);
    std::lock_guard<std::recursive_mutex> l(mutex_);
    pinned[(char*)p] = std::max<size_t>(n, 1);
    return {p, p, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
};
PinnedAlloc pinned_alloc;
bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> l(mutex_);
  auto it = pinned.upper_bound((char*)p);
  return it != pinned.begin() && ((--it)->first + it->second > (char*)p);
}

// ---- devices, streams, events
struct Event { int64_t at; };
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDev; }
  c10::Device exchangeDevice(c10::Device d) const override { auto o = getDevice(); setDevice(d); return o; }
  c10::Device getDevice() const override { return {kDev, current}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < n_devices, "fake device: invalid device ordinal ", (int)d.index());
    if (d.index() >= 0) current = d.index();
    used = true;
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    auto i = d.index() < 0 ? current : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kDev, i}, current_stream[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDev, d.index() < 0 ? current : d.index()});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    TORCH_CHECK(!no_streams, "fake device: there are no streams");
    return c10::Stream(c10::Stream::UNSAFE, {kDev, d.index() < 0 ? current : d.index()}, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device()); current_stream[s.device_index()] = s.id(); return old;
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new Event; ((Event*)*e)->at = clock_now++;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { std::lock_guard<std::recursive_mutex> l(mutex_); return pending.empty(); }
  c10::DeviceIndex deviceCount() const noexcept override { return n_devices; }
  bool queryStream(const c10::Stream&) const override { std::lock_guard<std::recursive_mutex> l(mutex_); return pending.empty(); }
  void synchronizeStream(const c10::Stream&) const override { waited("stream.synchronize"); }
  void synchronizeEvent(void*) const override { waited("event.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waited("device.synchronize"); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override { return ((Event*)b)->at - ((Event*)a)->at; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- generators: one that is on the device, around one of the CPU that draws
struct Gen final : at::CPUGeneratorImpl {
  explicit Gen(c10::DeviceIndex i, uint64_t seed = c10::detail::getNonDeterministicRandom()) : CPUGeneratorImpl(seed) {
    device_ = c10::Device(kDev, i); key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator& default_generator(c10::DeviceIndex i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int k = 0; k < kMax; k++) v.push_back(at::make_generator<Gen>(k, c10::default_rng_seed_val));
    return v;
  }();
  return all[i < 0 ? current : i];
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return n_devices > 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Gen>(i < 0 ? current : i); }
  at::Device getDeviceFromPtr(void*) const override { return {kDev, current}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_alloc; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return n_devices; }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({kDev, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto o = current; setCurrentDevice(i); return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { auto o = current; if (i >= 0) setCurrentDevice(i); return o; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto old = current; current = s.device().index();
    auto fresh = alloc.allocate(n);
    if (s.data()) std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(n);
    current = old;
  }
};
bool registered = [] { at::RegisterPrivateUse1HooksInterface(new Hooks); return true; }();

// ---- operators
at::Tensor as_cpu(const at::Tensor& t) {  // the same bytes, under the name of the CPU
  if (!t.defined() || !t.is_privateuseone()) return t;
  auto keep = t.storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), keep.nbytes(),
      c10::DataPtr(keep.mutable_data(), new c10::Storage(keep), [](void* c) { delete (c10::Storage*)c; }, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
at::Tensor as_device(const at::Tensor& t, c10::Device d) {  // takes the result of a kernel over
  if (!t.defined() || t.is_privateuseone()) return t;
  check_type(t.scalar_type());
  c10::DeviceGuard g(d);
  auto fresh = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), alloc.allocate(t.storage().nbytes()), &alloc, true)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
  fresh.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.storage().nbytes()) std::memcpy(fresh.storage().mutable_data(), t.storage().data(), t.storage().nbytes());
  return fresh;
}

const std::set<std::string> kReads = {"aten::nonzero", "aten::unique_dim", "aten::_unique2", "aten::masked_select", "aten::unique_consecutive",
  "aten::equal", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::repeat_interleave", "aten::bincount", "aten::histc"};
const std::set<std::string> kTakesCpu = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::set_"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto n = schema.arguments().size();
  const auto base = stack->size() - n;
  { std::lock_guard<std::recursive_mutex> l(mutex_); calls[name]++; }
  if (kReads.count(name)) waited(name);
  TORCH_CHECK_NOT_IMPLEMENTED(!no_scaler || name.rfind("aten::_amp_", 0) != 0, name, " is not implemented for the fake device");
  std::optional<c10::Device> where;
  auto see = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_privateuseone()) {
      TORCH_CHECK(!where || *where == t.device(), "Expected all tensors to be on the same device, but found ", *where, " and ", t.device(), " in ", name);
      where = t.device();
    }
  };
  auto strange = [&](const at::Tensor& t) {
    TORCH_CHECK(!t.defined() || t.is_privateuseone() || t.dim() == 0 || t.is_meta() || kTakesCpu.count(name),
        "Expected all tensors to be on the same device, but found at least two devices, ", *where, " and ", t.device(), "! (in ", name, ")");
  };
  std::vector<c10::IValue> before(stack->begin() + base, stack->end());
  for (auto& v : before) {
    if (v.isTensor()) see(v.toTensor());
    else if (v.isTensorList()) for (at::Tensor t : v.toTensorVector()) see(t);
    else if (v.isOptionalTensorList()) for (const auto& t : v.toOptionalTensorVector()) { if (t) see(*t); }
    else if (v.isDevice() && !where && v.toDevice().type() == kDev) where = v.toDevice().has_index() ? v.toDevice() : c10::Device(kDev, current);
  }
  if (!where) where = c10::Device(kDev, current);
  c10::DeviceGuard guard(*where);
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // of the device, of the CPU
  auto turn = [&](const at::Tensor& t) { strange(t); auto c = as_cpu(t); if (t.defined()) pairs.emplace_back(t, c); return c; };
  at::Generator device_gen, cpu_gen;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[base + i];
    if (v.isTensor()) v = turn(v.toTensor());
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (auto& t : v.toTensorVector()) l.push_back(turn(t)); v = l; }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const auto& t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<at::Tensor>(turn(*t)) : std::nullopt);
      v = l;
    } else if (v.isDevice()) v = c10::Device(c10::kCPU);
    else if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
      device_gen = v.isNone() ? default_generator(where->index()) : v.toGenerator();
      if (device_gen.device().type() == kDev) {
        cpu_gen = at::detail::createCPUGenerator();
        cpu_gen.set_state(device_gen.get_state());
        v = cpu_gen;
      }
    }
  }
  // Operators that draw without a Generator argument (dropout's native form) draw from the default one.
  at::Generator saved;
  auto host = at::detail::getDefaultCPUGenerator();
  const bool draws = !cpu_gen.defined() && (op.hasSchema() && (name == "aten::native_dropout" || name == "aten::randperm"));
  if (draws) { saved = host.clone(); host.set_state(default_generator(where->index()).get_state()); }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (draws) { default_generator(where->index()).set_state(host.get_state()); host.set_state(saved.get_state()); }
  if (cpu_gen.defined()) device_gen.set_state(cpu_gen.get_state());
  for (auto& [d, c] : pairs)
    if (d.is_privateuseone() && (c.storage().nbytes() != d.storage().nbytes() || c.sizes() != d.sizes() || c.strides() != d.strides())) {
      d.unsafeGetTensorImpl()->set_storage_and_dtype(as_device(c, d.device()).storage(), c.dtype());  // an out= that grew
      d.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides(), c.storage_offset());
    }
  auto give = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (auto& [d, c] : pairs) if (c.is_same(t)) return d;
    for (auto& [d, c] : pairs)
      if (d.is_privateuseone() && c.storage().data() && t.storage().data() == c.storage().data()) {  // a view
        auto v = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(d.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
        v.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
        return v;
      }
    return as_device(t, *where);
  };
  const auto r = schema.returns().size();
  for (size_t i = 0; i < r; i++) {
    auto& v = (*stack)[stack->size() - r + i];
    if (v.isTensor()) v = give(v.toTensor());
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (auto& t : v.toTensorVector()) l.push_back(give(t)); v = l; }
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dt, std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  check_type(c10::dtype_or_default(dt));
  c10::DeviceGuard g(d && d->has_index() ? *d : c10::Device(kDev, current));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt), mf);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dt, std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>) {
  check_type(c10::dtype_or_default(dt));
  c10::DeviceGuard g(d && d->has_index() ? *d : c10::Device(kDev, current));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt));
}
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  auto s = as_cpu(src), d = as_cpu(dst);
  { std::lock_guard<std::recursive_mutex> l(mutex_); calls["aten::_copy_from"]++; }
  if (src.is_privateuseone() && dst.is_cpu()) {
    if (non_blocking && (strict || is_pinned(dst.data_ptr())) && dst.is_contiguous()) {
      if (dst.nbytes()) std::memset(dst.data_ptr(), 0xFF, dst.nbytes());  // poison: NaN
      auto value = s.clone();  // what the device has at this place of its stream
      std::lock_guard<std::recursive_mutex> l(mutex_);
      pending.emplace_back([value, d] { at::AutoDispatchBelowADInplaceOrView g; d.copy_(value); });
      return dst;
    }
    waited("copy to the host");
  } else if (src.is_cpu() && dst.is_privateuseone() && src.dim() && !(non_blocking && is_pinned(src.data_ptr()))) {
    waited("copy from pageable memory");
  }
  d.copy_(s);
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
at::Scalar local_scalar(const at::Tensor& t) { waited("aten::_local_scalar_dense"); return at::_local_scalar_dense(as_cpu(t)); }
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> mf) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (mf && *mf != at::MemoryFormat::Contiguous && *mf != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*mf);
  size_t need = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->dtype().itemsize(), impl->storage_offset());
  if (need > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), need);
  return t;
}
at::Tensor& set_storage_(at::Tensor& t, at::Storage s, c10::SymInt off, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* i = t.unsafeGetTensorImpl();
  i->set_storage_keep_dtype(std::move(s));
  i->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), stride.size() || !size.size() ? C10_AS_INTARRAYREF_SLOW(stride) : at::IntArrayRef(c10::contiguous_strides(C10_AS_INTARRAYREF_SLOW(size))), off.guard_int(__FILE__, __LINE__));
  return t;
}
at::Tensor& set_source_(at::Tensor& t, at::Storage s) {
  int64_t n = s.nbytes() / t.dtype().itemsize();
  auto* i = t.unsafeGetTensorImpl();
  i->set_storage_keep_dtype(std::move(s)); i->set_storage_offset(0); i->set_sizes_contiguous({n});
  return t;
}
at::Tensor& set_tensor_(at::Tensor& t, const at::Tensor& o) {
  auto* i = t.unsafeGetTensorImpl();
  i->set_storage_keep_dtype(o.storage()); i->set_sizes_and_strides(o.sizes(), o.strides(), o.storage_offset());
  return t;
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> off) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), off ? std::optional<int64_t>(off->guard_int(__FILE__, __LINE__)) : std::nullopt);
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::SymIntArrayRef st, c10::SymIntArrayRef pa, c10::SymIntArrayRef di, bool tr, c10::SymIntArrayRef op, c10::SymInt g) {
  std::optional<at::Tensor> bias;
  if (b && b->defined()) bias = as_cpu(*b);
  return as_device(at::convolution(as_cpu(x), as_cpu(w), bias, C10_AS_INTARRAYREF_SLOW(st), C10_AS_INTARRAYREF_SLOW(pa), C10_AS_INTARRAYREF_SLOW(di), tr, C10_AS_INTARRAYREF_SLOW(op), g.guard_int(__FILE__, __LINE__)), x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& go, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef st, c10::SymIntArrayRef pa, c10::SymIntArrayRef di, bool tr, c10::SymIntArrayRef op, c10::SymInt g, std::array<bool, 3> mask) {
  auto [a, b, c] = at::convolution_backward(as_cpu(go), as_cpu(x), as_cpu(w), at::IntArrayRef{w.size(tr ? 1 : 0) * (tr ? g.guard_int(__FILE__, __LINE__) : 1)}, C10_AS_INTARRAYREF_SLOW(st), C10_AS_INTARRAYREF_SLOW(pa), C10_AS_INTARRAYREF_SLOW(di), tr, C10_AS_INTARRAYREF_SLOW(op), g.guard_int(__FILE__, __LINE__), mask);
  return {as_device(a, x.device()), as_device(b, x.device()), as_device(c, x.device())};
}
void record_stream(at::Tensor&, c10::Stream) {}
at::Tensor& dummy_set(at::Tensor& t) { return t; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_source_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
}  // namespace
namespace at::autocast { namespace {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_PROMOTE(PROMOTE)
}
}}  // namespace at::autocast

// ---- collectives: those of gloo on the same bytes; as NCCL, only for this device
namespace {
using namespace c10d;
using Ts = std::vector<at::Tensor>;
struct Group final : Backend {
  c10::intrusive_ptr<Backend> in;
  Group(c10::intrusive_ptr<Backend> b) : Backend(b->getRank(), b->getSize()), in(std::move(b)) {}
  const std::string getBackendName() const override { return "fakeccl"; }
  at::Tensor c(const at::Tensor& t) { TORCH_CHECK(t.is_privateuseone(), "fakeccl: no backend for tensors on ", t.device()); return as_cpu(t); }
  Ts c(const Ts& v) { Ts o; for (auto& t : v) o.push_back(c(t)); return o; }
  std::vector<Ts> c(const std::vector<Ts>& v) { std::vector<Ts> o; for (auto& t : v) o.push_back(c(t)); return o; }
  // gloo's future holds tensors of the CPU: give those of the device instead
  struct W final : Work {
    c10::intrusive_ptr<Work> w; Ts out; c10::intrusive_ptr<c10::ivalue::Future> f;
    W(c10::intrusive_ptr<Work> x, Ts o) : w(std::move(x)), out(std::move(o)) {
      f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), out.empty() ? std::vector<c10::Device>{} : std::vector<c10::Device>{out[0].device()});
      w->wait(); f->markCompleted(c10::IValue(out));
    }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
    void synchronize() override {}
    Ts result() override { return out; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return f; }
  };
  c10::intrusive_ptr<Work> d(c10::intrusive_ptr<Work> w, Ts out) { return c10::make_intrusive<W>(std::move(w), std::move(out)); }
  c10::intrusive_ptr<Work> broadcast(Ts& t, const BroadcastOptions& o) override { auto x = c(t); return d(in->broadcast(x, o), t); }
  c10::intrusive_ptr<Work> allreduce(Ts& t, const AllreduceOptions& o) override { auto x = c(t); 
    if (o.reduceOp == ReduceOp::AVG) { AllreduceOptions p = o; p.reduceOp = ReduceOp::SUM; auto w = in->allreduce(x, p); w->wait(); for (auto& y : x) y.div_(size_); return d(w, t); }
    return d(in->allreduce(x, o), t); }
  c10::intrusive_ptr<Work> allreduce_coalesced(Ts& t, const AllreduceCoalescedOptions& o) override { auto x = c(t); return d(in->allreduce_coalesced(x, o), t); }
  c10::intrusive_ptr<Work> reduce(Ts& t, const ReduceOptions& o) override { auto x = c(t); return d(in->reduce(x, o), t); }
  c10::intrusive_ptr<Work> allgather(std::vector<Ts>& r, Ts& t, const AllgatherOptions& o) override { auto y = c(r); auto x = c(t); return d(in->allgather(y, x, o), r[0]); }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& r, at::Tensor& t, const AllgatherOptions& o) override { auto y = c(r), x = c(t); return d(in->_allgather_base(y, x, o), {r}); }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Ts& r, Ts& t, const AllgatherOptions& o) override { auto y = c(r), x = c(t); return d(in->allgather_into_tensor_coalesced(y, x, o), r); }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Ts& r, Ts& t, const ReduceScatterOptions& o) override { auto y = c(r), x = c(t); return d(in->reduce_scatter_tensor_coalesced(y, x, o), r); }
  c10::intrusive_ptr<Work> gather(std::vector<Ts>& r, Ts& t, const GatherOptions& o) override { auto y = c(r); auto x = c(t); return d(in->gather(y, x, o), t); }
  c10::intrusive_ptr<Work> scatter(Ts& r, std::vector<Ts>& t, const ScatterOptions& o) override { auto y = c(r); auto x = c(t); return d(in->scatter(y, x, o), r); }
  c10::intrusive_ptr<Work> reduce_scatter(Ts& r, std::vector<Ts>& t, const ReduceScatterOptions& o) override { auto y = c(r); auto x = c(t); return d(in->reduce_scatter(y, x, o), r); }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& r, at::Tensor& t, const ReduceScatterOptions& o) override {
    auto y = c(r), x = c(t);
    if (o.reduceOp == ReduceOp::AVG) {  // each wait of gloo's copies the sum anew, so into a tensor of its own
      ReduceScatterOptions p = o; p.reduceOp = ReduceOp::SUM; auto z = at::empty_like(y);
      auto w = in->_reduce_scatter_base(z, x, p); w->wait(); y.copy_(z).div_(size_); return d(w, {r});
    }
    return d(in->_reduce_scatter_base(y, x, o), {r});
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& r, at::Tensor& t, std::vector<int64_t>& a, std::vector<int64_t>& b, const AllToAllOptions& o) override { auto y = c(r), x = c(t); return d(in->alltoall_base(y, x, a, b, o), {r}); }
  c10::intrusive_ptr<Work> barrier(const BarrierOptions& o) override { BarrierOptions p; p.timeout = o.timeout; return d(in->barrier(p), {}); }
  c10::intrusive_ptr<Work> send(Ts& t, int a, int b) override { auto x = c(t); return d(in->send(x, a, b), t); }
  c10::intrusive_ptr<Work> recv(Ts& t, int a, int b) override { auto x = c(t); return d(in->recv(x, a, b), t); }
  void setSequenceNumberForGroup() override { in->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return in->getSequenceNumberForGroup(); }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_count", [](int n) { n_devices = n; });
  m.def("count", [] { return n_devices; });
  m.def("waits", [] { std::lock_guard<std::recursive_mutex> l(mutex_); return waits; });
  m.def("calls", [] { std::lock_guard<std::recursive_mutex> l(mutex_); return calls; });
  m.def("reset", [] { std::lock_guard<std::recursive_mutex> l(mutex_); waits.clear(); calls.clear(); });
  m.def("raise_on_wait", [](bool b) { on_wait = b; });
  m.def("strict", [](bool b) { strict = b; });
  m.def("lack", [](const std::string& what) {
    bool* flag = what == "float64" ? &no_float64 : what == "pinned" ? &no_pinned : what == "streams" ? &no_streams : what == "scaler" ? &no_scaler : nullptr;
    TORCH_CHECK(flag || what == "collectives", "unknown: ", what);
    if (flag) *flag = true;
  });
  m.def("is_used", [] { for (auto& m : memory_) if (m.total) return true; return used.load(); });
  m.def("pending", [] { return pending.size(); });
  m.def("set_limit", [](int i, int64_t n) { memory_[i].limit = n; });
  m.def("generator", [](int i) { return default_generator(i); });
  m.def("exchange", [](int i) { auto o = current; current = i; return (int)o; });
  m.def("current", [] { return (int)current; });
  m.def("group", [](const c10::intrusive_ptr<Backend>& b) { return c10::intrusive_ptr<Backend>(c10::make_intrusive<Group>(b)); }, py::call_guard<py::gil_scoped_release>());
}
