//! The program that writes a container's log, for tests of this crate; the server has it as `mayfly log-shim`.

fn main() -> std::io::Result<()> {
    let config = std::env::args_os()
        .nth(2)
        .ok_or_else(|| std::io::Error::other("the path of the configuration is missing"))?;
    mayfly_runtime_oci::log_shim::run(std::path::Path::new(&config))
}
