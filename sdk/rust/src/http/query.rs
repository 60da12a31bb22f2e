//! Parses query strings.

/// The first value of a parameter, decoded. A parameter without `=` has an empty value.
pub(crate) fn find(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key) == name).then(|| decode(value))
    })
}

/// `+` is a space, `%41` a byte; invalid sequences are kept unchanged.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| bytes.get(at + 1..at + 3)).flatten().and_then(byte);
        match (hex, bytes[at]) {
            (Some(byte), _) => {
                decoded.push(byte);
                at += 2;
            }
            (None, b'+') => decoded.push(b' '),
            (None, other) => decoded.push(other),
        }
        at += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn byte(hex: &[u8]) -> Option<u8> {
    let digit = |c: u8| char::from(c).to_digit(16);
    u8::try_from(digit(hex[0])? * 16 + digit(hex[1])?).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn parameters() {
        let cases = [
            ("a=1&b=2", "b", Some("2")),
            ("a=1&a=2", "a", Some("1")),
            ("flag&a=", "flag", Some("")),
            ("a=x%20y+z", "a", Some("x y z")),
            ("a=%zz%4", "a", Some("%zz%4")),
            ("a=%C3%A9", "a", Some("é")),
            ("%61=1", "a", Some("1")),
            ("ab=1", "a", None),
            ("", "a", None),
        ];
        for (query, name, value) in cases {
            assert_eq!(super::find(query, name).as_deref(), value, "{query}");
        }
    }
}
