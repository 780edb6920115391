// Arrays that numpy saved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wavekv::bench {

struct NpyArray {
  std::vector<uint32_t> shape;
  bool half = false;        // Elements are float16, else float32.
  std::vector<char> bytes;  // Row-major, little endian.

  // `count` elements from number `first` on, as floats.
  std::vector<float> Floats(size_t first, size_t count) const;
};

// Reads a .npy file of '<f2' or '<f4' in C order; anything else ends the process with a message.
NpyArray ReadNpy(const std::string& path);

}  // namespace wavekv::bench
