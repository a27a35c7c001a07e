# The te backend: on request, with -DQE_TE=FOLDER. FOLDER holds an unpacked or installed transformer_engine_cu13:
# transformer_engine/ and the wheel's record of its version beside it. Its headers are compiled with; its library is
# opened at run time. Include behind cuda.cmake.
set(QE_TE "" CACHE PATH "folder that holds transformer_engine/; empty: no te backend")
if(NOT QE_TE)
  return()
endif()
if(NOT QE_CUDA)
  message(FATAL_ERROR "QE_TE is ${QE_TE}, and the te backend stands on the cuda backend: configure with -DQE_CUDA=ON")
endif()
get_filename_component(QE_TE_FOLDER ${QE_TE} ABSOLUTE)
find_path(QE_TE_INCLUDE transformer_engine/transformer_engine.h NO_DEFAULT_PATH NO_CACHE REQUIRED
          HINTS ${QE_TE_FOLDER}/transformer_engine/common/include)
file(GLOB te_record ${QE_TE_FOLDER}/transformer_engine_cu13-*.dist-info)
if(NOT te_record MATCHES "/transformer_engine_cu13-([0-9][^/;]*)\\.dist-info$")
  message(FATAL_ERROR "${QE_TE_FOLDER} holds no transformer_engine_cu13-VERSION.dist-info, which tells the version")
endif()
set(QE_TE_VERSION ${CMAKE_MATCH_1})
message(STATUS "Transformer Engine ${QE_TE_VERSION}: ${QE_TE_FOLDER}")

set(te_room ${CMAKE_SOURCE_DIR}/src/backend/te)
file(GLOB te_sources CONFIGURE_DEPENDS ${te_room}/*.c ${te_room}/*.cpp)
add_library(qeffect_te STATIC ${te_sources})
target_compile_options(qeffect_te PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-fvisibility=hidden>")
target_compile_definitions(qeffect_te PRIVATE QE_TE_VERSION="${QE_TE_VERSION}" QE_TE_FOLDER="${QE_TE_FOLDER}")
target_include_directories(qeffect_te SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${QE_TE_INCLUDE})
target_link_libraries(qeffect_te PUBLIC qeffect_cuda PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
