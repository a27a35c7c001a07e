# The host backend: kernels are compiled once per instruction level and chosen at run time; OpenBLAS is loaded at run time.
file(GLOB host_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backend/host/*.c)
add_library(qeffect_host STATIC ${host_sources})
target_link_libraries(qeffect_host PUBLIC qeffect PRIVATE ${CMAKE_DL_LIBS})
