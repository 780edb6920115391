// Lets this process and those that it starts find the fake driver instead of NVIDIA's.
#pragma once

namespace wavekv {

// False where the environment says WAVEKV_TEST_GPU=1: the tests then run on the GPU that is there,
// and those that need a driver which fails on command are to be skipped.
bool UseFakeCuda();

}  // namespace wavekv
