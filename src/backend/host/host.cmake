# The host backend: kernels are compiled once per instruction level and chosen at run time; OpenBLAS is loaded at run
# time.
file(GLOB host_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backend/host/*.c)
file(GLOB host_kernel_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backend/host/kernels/*.c)
add_library(qeffect_host STATIC ${host_sources})

# -O3 vectorizes; -fno-trapping-math lets comparisons and selects of floats be vectors (4 times faster quantization).
# Neither changes a bit of any result. Vector arguments stay inside inline functions, so their ABI does not matter.
function(qe_host_level level)
  add_library(qe_host_${level} OBJECT ${host_kernel_sources})
  target_compile_definitions(qe_host_${level} PRIVATE QE_LEVEL=${level} QE_LEVEL_${level}=1)
  target_compile_options(qe_host_${level} PRIVATE -O3 -fno-trapping-math -Wno-psabi ${ARGN})
  set_target_properties(qe_host_${level} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_sources(qeffect_host PRIVATE $<TARGET_OBJECTS:qe_host_${level}>)
endfunction()

qe_host_level(portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  qe_host_level(avx2 -mavx2)
  qe_host_level(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  target_compile_definitions(qeffect_host PRIVATE QE_HOST_X86)
endif()
target_link_libraries(qeffect_host PUBLIC qeffect PRIVATE ${CMAKE_DL_LIBS})
