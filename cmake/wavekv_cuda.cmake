# WAVEKV_CUDA_FOUND: build the CUDA kernels. AUTO builds them where nvcc is found and the host
# compiler is GNU without sanitizers; ON insists; OFF never.
set(WAVEKV_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE WAVEKV_CUDA PROPERTY STRINGS AUTO ON OFF)
set(WAVEKV_CUDA_FOUND OFF)

if(NOT WAVEKV_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "WAVEKV_CUDA is ${WAVEKV_CUDA}; allowed: AUTO, ON, OFF")
endif()
if(WAVEKV_CUDA STREQUAL "OFF")
  return()
endif()
if(WAVEKV_CUDA STREQUAL "AUTO" AND (WAVEKV_SANITIZE OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
  return()
endif()

find_program(WAVEKV_NVCC nvcc PATHS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
if(NOT WAVEKV_NVCC)
  if(WAVEKV_CUDA STREQUAL "ON")
    message(FATAL_ERROR "WAVEKV_CUDA is ON and nvcc was not found: install the CUDA Toolkit 13, "
                        "set CUDA_HOME, or configure with -DWAVEKV_CUDA=OFF")
  endif()
  message(STATUS "nvcc was not found: the CUDA kernels are not built")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${WAVEKV_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # Named in the flags: CMake 3.25 does not know 90a.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(WAVEKV_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${WAVEKV_CCACHE})
endif()
enable_language(CUDA)
# CMake 3.25 passes no -std=c++20 to nvcc 13.
set(CMAKE_CUDA_STANDARD_REQUIRED OFF)
unset(CMAKE_CUDA_STANDARD)
string(APPEND CMAKE_CUDA_FLAGS
       " -std=c++20 -gencode=arch=compute_90a,code=sm_90a -Xcompiler=-Wall,-Wextra")
find_package(CUDAToolkit REQUIRED)
set(WAVEKV_CUDA_FOUND ON)
