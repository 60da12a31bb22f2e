//! Reads files and streams of unknown length into memory, up to a limit: a device or a pipe may never end.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use super::format;

/// The largest component, artifact or event that a command reads into memory, in bytes. Above the server's default
/// limit of uploads, so that a server with a higher limit can be used.
pub(crate) const CONTENT_BYTES_MAX: u64 = 1 << 30;

/// Reads a file.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] for more than `bytes_max`, else the error of the file.
pub(crate) fn file(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    stream(File::open(path)?, bytes_max)
}

/// Reads a stream to its end; errors as those of [`file`].
pub(crate) fn stream(from: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    from.take(bytes_max.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > bytes_max {
        let why = format!("it has more than {}", format::bytes(bytes_max));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_refused() {
        let error = file(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it has more than 1 MiB");
        assert_eq!(stream(&b"abc"[..], 3).unwrap(), b"abc");
        assert!(stream(&b"abcd"[..], 3).is_err());
    }
}
