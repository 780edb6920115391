#include "bench/npy.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "storage/base/check.h"
#include "storage/base/dtype.h"

namespace wavekv::bench {

std::vector<float> NpyArray::Floats(size_t first, size_t count) const {
  const DType dtype = half ? DType::kF16 : DType::kF32;
  WAVEKV_CHECK((first + count) * DTypeBytes(dtype) <= bytes.size(), "elements of the array");
  std::vector<float> floats(count);
  ConvertToFloat(dtype, bytes.data() + first * DTypeBytes(dtype), count, floats.data());
  return floats;
}

NpyArray ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  WAVEKV_CHECK(file.good(), (path + ": cannot be read").c_str());
  char head[10] = {};
  file.read(head, sizeof(head));
  std::string text(static_cast<uint8_t>(head[8]) + 256u * static_cast<uint8_t>(head[9]), ' ');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  const size_t shape_at = text.find("'shape': (");
  NpyArray array;
  array.half = text.find("'<f2'") != std::string::npos;
  WAVEKV_CHECK(shape_at != std::string::npos && text.find("'fortran_order': False") != text.npos &&
                   (array.half || text.find("'<f4'") != std::string::npos),
               (path + ": expected a .npy file of '<f2' or '<f4' in C order").c_str());
  const char* at = text.c_str() + shape_at + std::strlen("'shape': (");
  while (*at != ')' && *at != '\0') {
    char* end = nullptr;
    array.shape.push_back(static_cast<uint32_t>(std::strtoul(at, &end, 10)));
    at = end + std::strspn(end, ", ");
  }
  array.bytes.assign(std::istreambuf_iterator<char>(file), {});
  return array;
}

}  // namespace wavekv::bench
