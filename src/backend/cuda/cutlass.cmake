# Kernels made of CUTLASS's templates, further candidates for 8-bit products. Include after qeffect_cuda exists. Without
# the headers, which tools/cuda_deps.sh fetches, the backend has cuBLASLt's algorithms and ours.
option(QE_CUTLASS "kernels of CUTLASS where its headers are found" ON)
find_path(QE_CUTLASS_INCLUDE cutlass/cutlass.h HINTS ${CMAKE_SOURCE_DIR}/build/cuda-deps/cutlass
          DOC "folder of cutlass/cutlass.h")
if(NOT QE_CUTLASS)
  return()
endif()
if(NOT QE_CUTLASS_INCLUDE)
  message(STATUS "no cutlass/cutlass.h (tools/cuda_deps.sh fetches it): products have cuBLASLt's algorithms and ours")
  return()
endif()
file(GLOB cutlass_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backend/cuda/cutlass_*.cu)
target_sources(qeffect_cuda PRIVATE ${cutlass_sources})
target_include_directories(qeffect_cuda SYSTEM PRIVATE ${QE_CUTLASS_INCLUDE})
target_compile_definitions(qeffect_cuda PRIVATE QE_CUTLASS)
# NDEBUG: its assertions in kernels would cost registers that the tiles need.
set_source_files_properties(${cutlass_sources} PROPERTIES COMPILE_DEFINITIONS NDEBUG
                            COMPILE_OPTIONS "--expt-relaxed-constexpr")
