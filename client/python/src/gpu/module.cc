// The extension module wavekv._gpu: attention over resident sequences on the device. Its public
// face is wavekv.gpu.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/gpu/host_copier.h"
#include "client/gpu/key_labeller.h"
#include "client/gpu/resident_batch.h"
#include "client/python/src/core/status.h"
#include "client/python/src/gpu/cuda_tensors.h"
#include "storage/base/model_shape.h"

namespace wavekv::python {
namespace py = pybind11;

// What a batch has opened: shared between Python and the batch.
struct OpenedSequence {
  std::shared_ptr<client::OpenSequence> open;
};

namespace {

using client::ResidentBatch;

Held<ResidentBatch> MakeBatch(const ModelShape& shape, uint64_t max_tokens, uint32_t batch,
                              uint32_t cluster_capacity, uint32_t segment_capacity,
                              uint32_t retrieve_capacity) {
  if (shape.value_dim != shape.key_dim) {
    throw py::value_error("value_dim is " + std::to_string(shape.value_dim) +
                          ", expected key_dim, " + std::to_string(shape.key_dim));
  }
  if (shape.kv_head_count == 0 || shape.query_head_count % shape.kv_head_count != 0) {
    throw py::value_error("query_heads is " + std::to_string(shape.query_head_count) +
                          ", expected a multiple of kv_heads, " +
                          std::to_string(shape.kv_head_count));
  }
  const client::ResidentModel model = {.layer_count = shape.layer_count,
                                       .kv_head_count = shape.kv_head_count,
                                       .group_size = shape.group_size(),
                                       .head_dim = shape.key_dim,
                                       .dtype = shape.dtype,
                                       .softmax_scale = shape.softmax_scale,
                                       .batch = batch,
                                       .max_tokens = max_tokens,
                                       .cluster_capacity = cluster_capacity,
                                       .segment_capacity = segment_capacity,
                                       .retrieve_capacity = retrieve_capacity};
  return Hold(WithoutGil([&] { return ResidentBatch::Create(model); }));
}

void Attend(ResidentBatch& self, uint32_t layer, const py::object& queries, const py::object& keys,
            const py::object& values, const py::object& out, const py::object& lse,
            const py::object& stream_object) {
  const client::ResidentModel& model = self.model();
  const client::CudaStream stream = StreamOf(stream_object);
  const int64_t batch = model.batch, kv_heads = model.kv_head_count, dim = model.head_dim;
  const int64_t heads = kv_heads * model.group_size;
  std::vector<CudaTensor> borrowed;  // Keeps them through the call.
  const auto borrow = [&](const py::object& object, const char* what, DType dtype,
                          const std::vector<int64_t>& shape) {
    CudaTensor& tensor = borrowed.emplace_back(BorrowCuda(object, what, stream));
    Expect(tensor, what, dtype, shape, self.device());
    return tensor.data;
  };
  client::ResidentTensors tensors;
  tensors.queries = borrow(queries, "queries", model.dtype, {batch, heads, dim});
  tensors.out = borrow(out, "out", model.dtype, {batch, heads, dim});
  tensors.lse = static_cast<float*>(borrow(lse, "lse", DType::kF32, {batch, heads}));
  if (!keys.is_none()) {
    tensors.new_keys = borrow(keys, "keys", model.dtype, {batch, kv_heads, dim});
  }
  if (!values.is_none()) {
    tensors.new_values = borrow(values, "values", model.dtype, {batch, kv_heads, dim});
  }
  Check(WithoutGil([&] { return self.Attend(layer, tensors, stream); }));
}

void BindBatch(py::module_& m) {
  using py::arg;
  py::class_<OpenedSequence>(m, "OpenedSequence");
  py::class_<ResidentBatch, Held<ResidentBatch>>(m, "ResidentBatch")
      .def(py::init(&MakeBatch), arg("shape"), arg("max_tokens"), arg("batch"),
           arg("cluster_capacity"), arg("segment_capacity"), arg("retrieve_capacity"))
      .def_property_readonly("device", &ResidentBatch::device)
      .def_property_readonly("device_uuid", &ResidentBatch::device_uuid)
      .def("open",
           [](ResidentBatch& self, const client::ResidentAttachment& attachment, int64_t wait_ms) {
             return OpenedSequence{Unwrap(WithoutGil(
                 [&] { return self.Open(attachment, std::chrono::milliseconds(wait_ms)); }))};
           })
      .def("set_sequence",
           [](ResidentBatch& self, uint32_t entry, const OpenedSequence* sequence,
              const py::object& stream) {
             const client::CudaStream handle = StreamOf(stream);
             Check(WithoutGil([&] {
               return self.SetSequence(entry, sequence == nullptr ? nullptr : sequence->open,
                                       handle);
             }));
           })
      .def("reserve_token", [](ResidentBatch& self) { Check(self.ReserveToken()); })
      .def("begin_token",
           [](ResidentBatch& self, const py::object& stream) {
             const client::CudaStream handle = StreamOf(stream);
             Check(WithoutGil([&] { return self.BeginToken(handle); }));
           })
      .def("attend", &Attend, arg("layer"), arg("queries"), arg("keys"), arg("values"), arg("out"),
           arg("lse"), arg("stream"))
      .def("note_covered", &ResidentBatch::NoteCovered)
      .def("note_stored", &ResidentBatch::NoteStored)
      .def("room", &ResidentBatch::RoomFor)
      .def("tokens", &ResidentBatch::TokensOf)
      .def("outcome", [](const ResidentBatch& self, uint32_t entry) {
        return ToString(self.OutcomeOf(entry));
      });
}

// A writable numpy array gets the tensor's bytes.
void CopyInto(client::HostCopier& copier, const CudaTensor& tensor, py::array target,
              const py::object& stream_object) {
  const client::CudaStream stream = StreamOf(stream_object);
  if (static_cast<size_t>(target.nbytes()) != tensor.bytes() ||
      (target.flags() & py::array::c_style) == 0) {
    throw py::value_error("the target has " + std::to_string(target.nbytes()) +
                          " bytes, the tensor " + std::to_string(tensor.bytes()) +
                          ": expected as many, in order");
  }
  void* const data = target.mutable_data();
  Check(WithoutGil(
      [&] { return copier.Copy(tensor.device, tensor.data, tensor.bytes(), data, stream); }));
}

void BindCopies(py::module_& m) {
  py::class_<CudaTensor>(m, "CudaTensor")
      .def(py::init([](const py::object& object, const char* what, const py::object& stream) {
        return BorrowCuda(object, what, StreamOf(stream));
      }))
      .def_property_readonly(
          "dtype", [](const CudaTensor& self) { return std::string(DTypeName(self.dtype)); })
      .def_property_readonly("shape",
                             [](const CudaTensor& self) { return py::tuple(py::cast(self.shape)); })
      .def_readonly("device", &CudaTensor::device);
  py::class_<client::HostCopier>(m, "HostCopier")
      .def(py::init([] { return Unwrap(client::HostCopier::Create()); }))
      .def("copy", &CopyInto);
}

std::unique_ptr<client::KeyLabels> Launch(client::KeyLabeller& labeller, const py::object& keys,
                                          uint64_t first_position, const py::list& segments,
                                          const py::object& stream_object) {
  const client::CudaStream stream = StreamOf(stream_object);
  const CudaTensor tensor = BorrowStrided(keys, "keys", stream);
  if (tensor.shape.size() != 3 || tensor.shape[0] != labeller.kv_head_count() ||
      tensor.shape[2] != labeller.head_dim()) {
    throw py::value_error("keys: expected [" + std::to_string(labeller.kv_head_count()) +
                          ", tokens, " + std::to_string(labeller.head_dim()) + "]");
  }
  if (tensor.dtype != labeller.dtype()) {
    throw py::type_error("keys: dtype is " + std::string(DTypeName(tensor.dtype)) + ", expected " +
                         std::string(DTypeName(labeller.dtype())));
  }
  if (tensor.strides[0] < 0 || tensor.strides[1] < 0 || tensor.strides[2] != 1) {
    throw py::value_error("keys: expected the elements of a key in a row");
  }
  // Of an axis of length 1 a library may say any stride.
  const auto stride = [&](size_t axis, uint32_t alone) {
    return tensor.shape[axis] == 1 ? alone : static_cast<uint64_t>(tensor.strides[axis]);
  };
  const client::DeviceKeys device_keys = {.data = tensor.data,
                                          .device = tensor.device,
                                          .head_stride = stride(0, 0),
                                          .token_stride = stride(1, labeller.head_dim()),
                                          .first_position = first_position,
                                          .token_count = static_cast<uint64_t>(tensor.shape[1])};
  std::vector<client::PlannedSegment> planned;
  for (const py::handle& handle : segments) {
    const auto segment = py::cast<py::tuple>(handle);
    planned.push_back({py::cast<uint64_t>(segment[0]), py::cast<uint32_t>(segment[1]),
                       py::cast<uint32_t>(segment[2])});
  }
  return Unwrap(WithoutGil([&] { return labeller.Launch(device_keys, planned, stream); }));
}

// (first_position, labels [kv_heads, tokens] uint16), copied.
py::list WaitForLabels(const client::KeyLabels& labels, uint32_t kv_head_count) {
  py::list segments;
  for (const client::SegmentLabels& segment : Unwrap(WithoutGil([&] { return labels.Wait(); }))) {
    const std::vector<py::ssize_t> shape = {kv_head_count, segment.token_count};
    segments.append(py::make_tuple(segment.first_position,
                                   py::array_t<uint16_t>(shape, segment.labels.data())));
  }
  return segments;
}

void BindLabels(py::module_& m) {
  py::class_<client::KeyLabels>(m, "KeyLabels")
      .def_property_readonly("ready", &client::KeyLabels::Ready)
      .def_property_readonly("segment_count", &client::KeyLabels::segment_count)
      .def("wait", &WaitForLabels);
  py::class_<client::KeyLabeller>(m, "KeyLabeller")
      .def(py::init([](const ModelShape& shape) {
        return Unwrap(client::KeyLabeller::Create(shape.kv_head_count, shape.key_dim, shape.dtype));
      }))
      .def("launch", &Launch);
}

}  // namespace

PYBIND11_MODULE(_gpu, m) {
  // Knows the shapes and attachments that are passed here.
  py::module_::import("wavekv._core");
  TranslateStatuses();
  BindBatch(m);
  BindCopies(m);
  BindLabels(m);
}

}  // namespace wavekv::python
