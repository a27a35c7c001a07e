# Tests of what is neither one room nor one unit: the style of the whole, and the program as its user meets it.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# Sanitizers add symbols and change no text, so the style is looked at once, in the plain build.
if(NOT QE_SANITIZE AND NOT QE_COVERAGE)
  add_test(NAME tidy COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/tools/tidy.py --library $<TARGET_FILE:qeffect>
           WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
endif()

# A file per subject: tests/end_to_end/test_<subject>.py, given the program; standard library only.
file(GLOB end_to_end_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/end_to_end/test_*.py)
foreach(source ${end_to_end_sources})
  get_filename_component(name ${source} NAME_WE)
  add_test(NAME end_to_end/${name} COMMAND Python3::Interpreter ${source} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(end_to_end/${name} PROPERTIES
    ENVIRONMENT "QEFFECT=$<TARGET_FILE:qeffect_cli>;QE_SANITIZE=${QE_SANITIZE};PYTHONDONTWRITEBYTECODE=1"
    SKIP_RETURN_CODE 77)
endforeach()
