//! A program, not a function: it runs to completion in a Pod with
//! `runtimeClassName: wasm`. Prints its arguments and environment, and exits with the
//! code in EXIT_CODE.

use std::io::Write as _;

fn main() {
    for argument in std::env::args() {
        println!("argument {argument}");
    }
    for (name, value) in std::env::vars() {
        println!("environment {name}={value}");
    }
    let code = std::env::var("EXIT_CODE").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    eprintln!("exiting with {code}");
    std::io::stdout().flush().expect("the log takes it");
    // `std::process::exit` reports only success or failure on wasm32-wasip2.
    wasip2::cli::exit::exit_with_code(code);
}
