# One way to declare a room, a program and a test, so that all get the same warnings and includes.

add_library(wavekv_options INTERFACE)
target_include_directories(wavekv_options INTERFACE ${CMAKE_SOURCE_DIR})
# A designated initialiser leaves the other members at their defaults on purpose.
target_compile_options(wavekv_options INTERFACE -Wall -Wextra -Wno-missing-field-initializers
                       -Werror=return-type -Werror=unused-result)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(wavekv_options INTERFACE -Wthread-safety -Werror=thread-safety)
endif()
target_compile_definitions(wavekv_options INTERFACE WAVEKV_VERSION="${PROJECT_VERSION}")
if(WAVEKV_SANITIZE)
  target_compile_options(wavekv_options INTERFACE -fsanitize=${WAVEKV_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(wavekv_options INTERFACE -fsanitize=${WAVEKV_SANITIZE})
endif()

# wavekv_library(NAME SRCS files... DEPS targets...): a static library wavekv_NAME, alias
# wavekv::NAME. DEPS are public.
function(wavekv_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(wavekv_${name} STATIC ${ARG_SRCS})
    target_link_libraries(wavekv_${name} PUBLIC wavekv_options ${ARG_DEPS})
  else()
    add_library(wavekv_${name} INTERFACE)
    target_link_libraries(wavekv_${name} INTERFACE wavekv_options ${ARG_DEPS})
  endif()
  add_library(wavekv::${name} ALIAS wavekv_${name})
endfunction()

# wavekv_program(NAME SRCS files... DEPS targets...): an installed executable.
function(wavekv_program name)
  cmake_parse_arguments(ARG "NO_INSTALL" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE wavekv_options ${ARG_DEPS})
  if(NOT ARG_NO_INSTALL)
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()

# wavekv_test(NAME DEPS targets... [LABELS labels...] [TIMEOUT seconds] [SRCS extra files...]): a
# GoogleTest program from NAME.cc, one CTest test per case.
function(wavekv_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${name}.cc ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE wavekv_options ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
                       PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
