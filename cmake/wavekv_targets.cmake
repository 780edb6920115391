# One way to declare a room, a program and a test, so that all get the same warnings and includes.

# What others link, installed or as a subdirectory, carries the language and, where there are any, the
# sanitizers, which all of a program must have. Our warnings are for us.
add_library(wavekv_options INTERFACE)
target_compile_features(wavekv_options INTERFACE cxx_std_20)
target_include_directories(wavekv_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
if(PROJECT_IS_TOP_LEVEL)
  # A designated initialiser leaves the other members at their defaults on purpose.
  set(warnings -Wall -Wextra -Wno-missing-field-initializers -Werror=return-type
      -Werror=unused-result)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND warnings -Wthread-safety -Werror=thread-safety)
  endif()
  target_compile_options(wavekv_options INTERFACE "$<BUILD_INTERFACE:${warnings}>")
endif()
target_compile_definitions(wavekv_options
                           INTERFACE $<BUILD_INTERFACE:WAVEKV_VERSION="${PROJECT_VERSION}">)
if(WAVEKV_SANITIZE)
  target_compile_options(wavekv_options INTERFACE -fsanitize=${WAVEKV_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(wavekv_options INTERFACE -fsanitize=${WAVEKV_SANITIZE})
endif()

install(TARGETS wavekv_options EXPORT wavekvTargets)

# wavekv_install_library(NAME [HEADERS files...] [EXPORT set]): installs a target wavekv_NAME as
# wavekv::NAME of the package, with those of its headers that users include. For the SDK and what it
# links. What needs the CUDA Toolkit is in a set of its own, wavekvGpuTargets.
function(wavekv_install_library name)
  cmake_parse_arguments(ARG "" "EXPORT" "HEADERS" ${ARGN})
  if(NOT ARG_EXPORT)
    set(ARG_EXPORT wavekvTargets)
  endif()
  set_target_properties(wavekv_${name} PROPERTIES EXPORT_NAME ${name})
  target_sources(wavekv_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}
                                       FILES ${ARG_HEADERS})
  install(TARGETS wavekv_${name} EXPORT ${ARG_EXPORT}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/wavekv)
endfunction()

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

# wavekv_test(NAME DEPS targets... [LABELS labels...] [TIMEOUT seconds] [SRCS extra files...]
# [OPTIMISED]): a GoogleTest program from NAME.cc, one CTest test per case; under a sanitizer it has
# twice the time. OPTIMISED: what NAME.cc computes itself takes longer than its compiler, so the
# sanitizers' builds optimise it, too.
function(wavekv_test name)
  cmake_parse_arguments(ARG "OPTIMISED" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(WAVEKV_SANITIZE)
    math(EXPR ARG_TIMEOUT "2 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${name}.cc ${ARG_SRCS})
  if(WAVEKV_SANITIZE AND NOT ARG_OPTIMISED)
    # Half the time to compile, and no access is optimised away; the rooms keep their preset's level.
    set_source_files_properties(${name}.cc PROPERTIES COMPILE_OPTIONS -O0)
  endif()
  target_link_libraries(${name} PRIVATE wavekv_options ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  if(WAVEKV_SANITIZE STREQUAL "thread")
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/tsan_suppressions.cc)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
                       PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
