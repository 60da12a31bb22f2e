//! A minimal HTTP/1.1 client for measurements, on blocking sockets.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};

/// The timeout of a server's response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// A whole response; the names of its headers are in lower case.
#[derive(Debug)]
pub struct HttpResponse {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpResponse {
    /// The value of the first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One keep-alive connection.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
}

impl Connection {
    /// Connects, with a timeout of a minute for each read.
    pub fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream), address })
    }

    /// Sends a GET request and reads the whole response.
    pub fn get(&mut self, path: &str) -> Result<HttpResponse> {
        self.call("GET", path, &[], &[])
    }

    /// Sends a request and reads the whole response.
    pub fn call(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<HttpResponse> {
        self.send(method, path, headers, body)?;
        self.receive().with_context(|| format!("{method} http://{}{path}", self.address))
    }

    /// Sends a request without reading its response.
    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<()> {
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.address);
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            request.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        request.push_str("\r\n");
        let mut request = request.into_bytes();
        request.extend_from_slice(body);
        self.stream.get_mut().write_all(&request).context("cannot send")
    }

    /// Reads the whole response to the oldest request without one.
    pub fn receive(&mut self) -> Result<HttpResponse> {
        read_answer(&mut self.stream)
    }
}

fn read_answer(stream: &mut impl BufRead) -> Result<HttpResponse> {
    let status_line = line(stream)?;
    let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.with_context(|| format!("no HTTP answer: {status_line:?}"))?;
    let mut headers = Vec::new();
    loop {
        let header = line(stream)?;
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(':').with_context(|| format!("no header: {header:?}"))?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut answer = HttpResponse { status, headers, body: Vec::new() };
    if answer.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        read_chunks(stream, &mut answer.body)?;
    } else if let Some(length) = answer.header("content-length") {
        let length = length.parse().context("content-length is not a number")?;
        answer.body.resize(length, 0);
        stream.read_exact(&mut answer.body).context("the body was cut short")?;
    } else if status != 204 && status != 304 {
        stream.read_to_end(&mut answer.body)?;
    }
    Ok(answer)
}

fn read_chunks(stream: &mut impl BufRead, body: &mut Vec<u8>) -> Result<()> {
    loop {
        let head = line(stream)?;
        let size = head.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(size, 16).with_context(|| format!("no chunk size: {head:?}"))?;
        if size == 0 {
            // Trailers, up to an empty line.
            while !line(stream)?.is_empty() {}
            return Ok(());
        }
        let read = stream.by_ref().take(size).read_to_end(body)?;
        if read as u64 != size || !line(stream)?.is_empty() {
            bail!("the body was cut short");
        }
    }
}

fn line(stream: &mut impl BufRead) -> Result<String> {
    let mut text = String::new();
    if stream.read_line(&mut text).context("no answer")? == 0 {
        bail!("the server closed the connection");
    }
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The address in `http://127.0.0.1:8080` or `https://127.0.0.1:8443`.
pub fn address_of(url: &str) -> Result<SocketAddr> {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let rest = rest.with_context(|| format!("{url} is not an http:// or https:// URL"))?;
    rest.trim_end_matches('/').parse().with_context(|| format!("{url} has no address and port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<HttpResponse> {
        read_answer(&mut text.as_bytes())
    }

    #[test]
    fn bodies_end_by_length_by_chunks_or_by_closing() {
        let answer = read("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhellomore").unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
        let chunked = "HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\nA;x=y\r\nlo, worlds\r\n0\r\n\r\n";
        let answer = read(chunked).unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (500, "hello, worlds"));
        assert_eq!(read("HTTP/1.1 200 OK\r\n\r\nto the end").unwrap().text(), "to the end");
    }

    #[test]
    fn an_answer_cut_short_is_an_error() {
        assert!(read("").is_err());
        assert!(read("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel").is_err());
        assert!(read("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel").is_err());
        assert!(read("SSH-2.0\r\n").is_err());
    }

    #[test]
    fn addresses_come_from_urls() {
        assert_eq!(address_of("http://127.0.0.1:80/").unwrap().port(), 80);
        assert_eq!(address_of("https://127.0.0.1:81").unwrap().port(), 81);
        assert!(address_of("ftp://127.0.0.1:80").is_err());
    }
}
