use wasip2::http::types::{Fields, HeaderError};

use super::{HttpError, HttpErrorKind};

/// Headers in order of arrival, with names in lower case. A name may occur several times.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Headers {
    entries: Vec<(String, Vec<u8>)>,
}

/// Headers of a single connection, which the host handles; they are removed from outgoing messages, so that a received
/// response can be returned unchanged.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl Headers {
    /// The first value of a header, if it is present and is text.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.get_bytes(name).and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The first value of a header.
    pub fn get_bytes(&self, name: &str) -> Option<&[u8]> {
        self.entries.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }

    /// Every value of a header.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.entries
            .iter()
            .filter(move |(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_slice())
    }

    /// Sets a header to one value.
    pub fn insert(&mut self, name: &str, value: impl Into<Vec<u8>>) {
        self.remove(name);
        self.append(name, value);
    }

    /// Adds a value, and keeps the existing ones.
    pub fn append(&mut self, name: &str, value: impl Into<Vec<u8>>) {
        self.entries.push((name.to_ascii_lowercase(), value.into()));
    }

    /// Removes a header with all its values.
    pub fn remove(&mut self, name: &str) {
        self.entries.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
    }

    /// All names in lower case, with their values, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.entries.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// The number of values; a name with two values counts twice.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no headers.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn from_wasi(fields: &Fields) -> Self {
        let mut entries = fields.entries();
        entries.iter_mut().for_each(|(name, _)| name.make_ascii_lowercase());
        Headers { entries }
    }

    /// The headers for sending, without those of a single connection.
    pub(crate) fn into_wasi(mut self) -> Result<Fields, HttpError> {
        self.entries.retain(|(name, _)| !HOP_BY_HOP.contains(&name.as_str()));
        Fields::from_list(&self.entries).map_err(|error| {
            let problem = match error {
                HeaderError::InvalidSyntax => "a name or value is invalid in HTTP",
                HeaderError::Forbidden => "one of them may only be set by the host",
                _ => "the host rejects them",
            };
            let names: Vec<&str> = self.iter().map(|(name, _)| name).collect();
            HttpError::new(HttpErrorKind::InvalidRequest, format!("headers {}: {problem}", names.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_depend_on_case() {
        let mut headers = Headers::default();
        headers.append("Accept", "a");
        headers.append("accept", "b");
        assert_eq!(headers.get("ACCEPT"), Some("a"));
        assert_eq!(headers.get_all("accept").count(), 2);
        headers.insert("aCCept", "c");
        assert_eq!(headers.iter().collect::<Vec<_>>(), [("accept", b"c".as_slice())]);
        headers.append("x-raw", [0xff]);
        assert_eq!((headers.get("x-raw"), headers.get_bytes("x-raw")), (None, Some([0xff].as_slice())));
    }
}
