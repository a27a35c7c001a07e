# The cuda backend: built when the CUDA 13 toolkit and cudnn-frontend's headers are there (or asked for with
# -DQE_CUDA=ON). It needs no GPU to build. cuBLASLt is linked; cuDNN is loaded at run time, its headers and the
# frontend's are found or fetched by tools/cuda_deps.sh.
find_program(QE_NVCC nvcc HINTS /usr/local/cuda/bin)
find_path(QE_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${CMAKE_SOURCE_DIR}/build/cuda-deps/cudnn_frontend
          DOC "folder of cudnn_frontend.h")
if(QE_NVCC AND QE_CUDNN_FRONTEND_INCLUDE)
  set(QE_CUDA_FOUND ON)
else()
  set(QE_CUDA_FOUND OFF)
endif()
option(QE_CUDA "the cuda backend; ON where its toolkit and headers were found" ${QE_CUDA_FOUND})
if(NOT QE_CUDA)
  if(QE_NVCC AND NOT QE_CUDA_FOUND)
    message(STATUS "a CUDA toolkit is there: tools/cuda_deps.sh fetches what else the cuda backend is built with")
  endif()
  return()
endif()
if(NOT QE_NVCC)
  message(FATAL_ERROR "QE_CUDA is ON and nvcc is not to be found: install the CUDA 13 toolkit, or configure without it")
endif()
set(CMAKE_CUDA_COMPILER ${QE_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA CXX)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CXX_STANDARD 17)
find_package(CUDAToolkit 13 REQUIRED)

set(cuda_room ${CMAKE_SOURCE_DIR}/src/backend/cuda)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${cuda_room}/*.c ${cuda_room}/*.cu ${cuda_room}/*.cpp)
list(FILTER cuda_sources EXCLUDE REGEX "/cutlass_[a-z0-9_]*\\.cu$") # cutlass.cmake adds them where their headers are
add_library(qeffect_cuda STATIC ${cuda_sources})
set_target_properties(qeffect_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)
# --fmad=false: a multiply-add is fused only where the source says so, as on the host.
target_compile_options(qeffect_cuda PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--fmad=false;-lineinfo;-Xcompiler=-Wall,-Wextra>")
target_include_directories(qeffect_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(qeffect_cuda PUBLIC qeffect qeffect_local
                      PRIVATE CUDA::cudart_static CUDA::cublasLt ${CMAKE_DL_LIBS} rt)
include(${CMAKE_SOURCE_DIR}/src/backend/cuda/cudnn.cmake)
include(${CMAKE_SOURCE_DIR}/src/backend/cuda/cutlass.cmake)
