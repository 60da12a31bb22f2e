//! A job that ends as its arguments say: `exit CODE`, `panic`, `oom`, `sleep SECONDS`. Before that it writes a
//! parameter and an artifact, if it has an output folder.

use std::{fs, io::Write as _, time::Duration};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (how, what) = (arguments.next().unwrap_or_default(), arguments.next().unwrap_or_default());
    if fs::metadata("/mayfly/out").is_ok() {
        fs::write("/mayfly/out/progress", "half").expect("the outputs can be written");
        fs::write("/mayfly/out/artifacts/notes.txt", "what was done so far\n").expect("so can artifacts");
    }
    println!("about to {how} {what}");
    eprintln!("it will not end well");
    match how.as_str() {
        "exit" => exit(what.parse().unwrap_or(1)),
        "panic" => panic!("as it was told"),
        "oom" => {
            let mut kept = Vec::new();
            loop {
                kept.push(vec![1_u8; 1 << 20]);
            }
        }
        "sleep" => {
            std::thread::sleep(Duration::from_secs(what.parse().unwrap_or(3600)));
        }
        _ => exit(2),
    }
}

/// `std::process::exit` reports only success or failure on wasm32-wasip2.
fn exit(code: u8) {
    std::io::stdout().flush().expect("the log takes it");
    wasip2::cli::exit::exit_with_code(code);
}
