//! Gives the library the name under which programs know the driver's.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // Like the driver: its own references are not interposed by a preloaded library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
