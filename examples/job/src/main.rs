//! A program, not a function: it runs to completion in a Pod with
//! `runtimeClassName: wasm`. Prints its arguments and environment, and exits with the
//! code in EXIT_CODE.

use std::process::ExitCode;

fn main() -> ExitCode {
    for argument in std::env::args() {
        println!("argument {argument}");
    }
    for (name, value) in std::env::vars() {
        println!("environment {name}={value}");
    }
    let code = std::env::var("EXIT_CODE").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    eprintln!("exiting with {code}");
    ExitCode::from(code)
}
