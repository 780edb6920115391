# What `cmake --install` and CPack put beside the programs: the package that find_package(wavekv)
# finds, the protocol for clients in other languages, licence and documents.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/wavekv)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/wavekvConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/wavekvConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor release may break.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/wavekvConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/wavekvConfig.cmake
              ${PROJECT_BINARY_DIR}/wavekvConfigVersion.cmake DESTINATION ${package_dir})
install(EXPORT wavekvTargets NAMESPACE wavekv:: DESTINATION ${package_dir})
if(WAVEKV_CUDA_FOUND)
  install(EXPORT wavekvGpuTargets NAMESPACE wavekv:: DESTINATION ${package_dir})
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/wavekv DESTINATION ${CMAKE_INSTALL_DATADIR}/wavekv/proto
        FILES_MATCHING PATTERN "*.proto")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_PACKAGE_NAME wavekv)
  set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Vector storage engine for the KV cache of language models")
  set(CPACK_PACKAGE_CONTACT "WaveKV maintainers")
  set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
  set(CPACK_GENERATOR TGZ)
  set(CPACK_STRIP_FILES ON)
  # For cpack -G DEB.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  include(CPack)
endif()
