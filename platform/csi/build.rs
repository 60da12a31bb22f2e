//! Generates the messages and services of CSI and of the plugin registration API.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_protos(&["proto/csi.proto", "proto/pluginregistration.proto"], &["proto"])
}
