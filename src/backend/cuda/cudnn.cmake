# Headers for attention.cpp: cudnn-frontend's (a library of headers) and cuDNN's. Include after qeffect_cuda exists.
# libcudnn itself is no part of the build: it is opened at run time (QE_CUDNN names it where the loader cannot find it).
set(qe_cuda_deps ${CMAKE_SOURCE_DIR}/build/cuda-deps)
find_path(QE_CUDNN_INCLUDE cudnn.h HINTS ${qe_cuda_deps}/cudnn ${CUDAToolkit_INCLUDE_DIRS} DOC "folder of cudnn.h")
if(NOT QE_CUDNN_FRONTEND_INCLUDE OR NOT QE_CUDNN_INCLUDE)
  message(FATAL_ERROR "the cuda backend is compiled with cudnn_frontend.h and cudnn.h: run tools/cuda_deps.sh, which "
                      "fetches them into build/cuda-deps, or set QE_CUDNN_FRONTEND_INCLUDE and QE_CUDNN_INCLUDE")
endif()
# SYSTEM: their warnings are not ours.
target_include_directories(qeffect_cuda SYSTEM PRIVATE ${QE_CUDNN_FRONTEND_INCLUDE} ${QE_CUDNN_INCLUDE})
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/backend/cuda/attention.cpp PROPERTIES COMPILE_DEFINITIONS
  "NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING;NV_CUDNN_FRONTEND_DISABLE_LOGGING;CUDNN_FRONTEND_SKIP_JSON_LIB")

# build/bench_products: checks and times every product and attention on a GPU; see tests/cuda/bench_products.c.
file(GLOB bench_products_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cuda/bench_products*.c)
add_executable(bench_products EXCLUDE_FROM_ALL ${bench_products_sources})
target_include_directories(bench_products PRIVATE ${CMAKE_SOURCE_DIR}/tests)
target_include_directories(bench_products SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(bench_products PRIVATE qeffect_cuda)
