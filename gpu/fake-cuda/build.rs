//! Sets the soname under which programs load the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Like the driver: a preloaded library does not interpose the library's own references.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
