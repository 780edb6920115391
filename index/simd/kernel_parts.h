// Each file of loops fills its part of a level's table, for the target that Highway has chosen.
#pragma once

#include "index/simd/kernels.h"

namespace wavekv::simd {

void SetDotKernels(Kernels* kernels);
void SetAccumulateKernels(Kernels* kernels);
void SetSketchKernels(Kernels* kernels);
void SetElementwiseKernels(Kernels* kernels);
void SetAssignKernels(Kernels* kernels);

}  // namespace wavekv::simd
