//! An HTTP server for an image: answers each request with `hello`, on keep-alive connections, with a thread for each.
//! A program of its own: the benchmark compiles it.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 6\r\n\r\nhello\n";

fn main() {
    let port = std::env::var("PORT").unwrap_or_else(|_| "8080".to_owned());
    let listener = TcpListener::bind(format!("0.0.0.0:{port}")).expect("the port is free");
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || serve(stream));
    }
}

/// Answers until the client closes.
fn serve(stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut writer = stream.try_clone()?;
    let mut line = String::new();
    let mut reader = BufReader::new(stream);
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        // The empty line ends the head; requests have no body.
        if line == "\r\n" {
            writer.write_all(ANSWER)?;
        }
    }
}
