// absl::Status as Python's exceptions, and calls without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace wavekv::python {

// Carries an absl::Status to the exception translator. Of each module its own: what is thrown in
// one is not caught in another.
class StatusException : public std::exception {
 public:
  explicit StatusException(absl::Status status) : status_(std::move(status)) {}
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return "wavekv status"; }

 private:
  absl::Status status_;
};

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusException(status);
}

template <class T>
T Unwrap(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

// Runs `call` without the GIL.
template <class Call>
auto WithoutGil(Call&& call) {
  pybind11::gil_scoped_release release;
  return call();
}

// What ends in a call that takes time: other Python threads run meanwhile.
struct DeleteWithoutGil {
  template <class T>
  void operator()(T* object) const {
    pybind11::gil_scoped_release release;
    delete object;
  }
};
template <class T>
using Held = std::unique_ptr<T, DeleteWithoutGil>;

// Hands what the SDK made over to Python.
template <class T>
Held<T> Hold(absl::StatusOr<std::unique_ptr<T>> made) {
  return Held<T>(Unwrap(std::move(made)).release());
}

// Once, when a module is made.
inline void TranslateStatuses() {
  pybind11::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const StatusException& e) {
      const pybind11::object error = pybind11::module_::import("wavekv.errors")
                                         .attr("from_status")(static_cast<int>(e.status().code()),
                                                              std::string(e.status().message()));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
  });
}

}  // namespace wavekv::python
