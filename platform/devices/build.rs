//! Generates the messages and services of the device plugin API.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_protos(&["proto/deviceplugin.proto"], &["proto"])
}
