//! Parses JSON text to [`Value`], with Jackson's error messages, which the AWS API returns to its callers.

use std::fmt;
use std::sync::Arc;

use super::{Map, Number, Value};

/// The maximum nesting of containers, as in Jackson's `StreamReadConstraints`.
pub const DEPTH_MAX: usize = 1000;
/// The maximum number of characters of a number, as in Jackson's `StreamReadConstraints`.
const NUMBER_CHARS_MAX: usize = 1000;
const VALUES: &str = "(JSON String, Number, Array, Object or token 'null', 'true' or 'false')";

/// An error in JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonError {
    pub kind: JsonErrorKind,
    /// Jackson's message, without the location.
    pub message: String,
    /// Counted from 1.
    pub line: usize,
    /// As in Jackson: one past the offending character, which is counted from 1, in UTF-16 units.
    pub column: usize,
}

/// The kinds of [`JsonError`] that callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonErrorKind {
    Syntax,
    /// The text is empty or ends too early.
    Incomplete,
    DuplicateField,
    TooDeep,
    TooLarge,
}

impl JsonError {
    /// Jackson's complete message about `source`: the error, the quoted beginning of the text, the location.
    pub fn describe(&self, source: &str) -> String {
        format!("{}\n at {}", self.message, self.location(source))
    }

    /// The location in `source` in Jackson's format: `[Source: (String)"…"; line: 1, column: 4]`.
    pub fn location(&self, source: &str) -> String {
        place(source, self.line, self.column)
    }
}

/// The maximum number of characters of the text that Jackson quotes.
const QUOTED_CHARS: usize = 500;

fn place(source: &str, line: usize, column: usize) -> String {
    let quoted = match source.char_indices().nth(QUOTED_CHARS) {
        None => format!("\"{source}\""),
        Some((at, _)) => {
            format!("\"{}\"[truncated {} chars]", &source[..at], source[at..].chars().count())
        }
    };
    format!("[Source: (String){quoted}; line: {line}, column: {column}]")
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at line: {}, column: {}", self.message, self.line, self.column)
    }
}

impl std::error::Error for JsonError {}

impl Value {
    /// Parses one JSON value; the last of duplicate keys wins, as in Jackson.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        Parser::new(text, false).document()
    }

    /// Parses one JSON value, and rejects duplicate keys in an object.
    pub fn parse_strict(text: &str) -> Result<Self, JsonError> {
        Parser::new(text, true).document()
    }

    /// Parses a text of at most `bytes_max` bytes.
    pub fn parse_bytes_max(text: &str, bytes_max: usize) -> Result<Self, JsonError> {
        if text.len() > bytes_max {
            let message = format!("The text has {} bytes, the limit is {bytes_max}", text.len());
            return Err(JsonError { kind: JsonErrorKind::TooLarge, message, line: 1, column: 1 });
        }
        Self::parse(text)
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    refuse_duplicates: bool,
}

type Parsed<T> = Result<T, JsonError>;

impl<'a> Parser<'a> {
    fn new(text: &'a str, refuse_duplicates: bool) -> Self {
        Self { text, at: 0, depth: 0, refuse_duplicates }
    }

    fn document(mut self) -> Parsed<Value> {
        self.skip_space();
        if self.at == self.text.len() {
            return Err(
                self.error(JsonErrorKind::Incomplete, "No content to map due to end-of-input".to_owned())
            );
        }
        let value = self.value()?;
        self.skip_space();
        if self.at < self.text.len() {
            return Err(self.odd_value());
        }
        Ok(value)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn error(&self, kind: JsonErrorKind, message: String) -> JsonError {
        let (line, column) = self.place_of(self.at);
        JsonError { kind, message, line, column }
    }

    /// Line and column of a byte position, from 1.
    fn place_of(&self, at: usize) -> (usize, usize) {
        let before = &self.text[..at];
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        let row = before.rsplit('\n').next().unwrap_or_default();
        (line, row.chars().map(char::len_utf16).sum::<usize>() + 1)
    }

    /// The error for the current character; Jackson has consumed it, so the column is one further.
    fn unexpected(&mut self, comment: &str) -> JsonError {
        let Some(found) = self.text[self.at..].chars().next() else {
            return self.ended("");
        };
        let message = format!("Unexpected character ({}): {comment}", name_of(found));
        self.at += found.len_utf8();
        self.error(JsonErrorKind::Syntax, message)
    }

    fn ended(&self, where_: &str) -> JsonError {
        self.error(JsonErrorKind::Incomplete, format!("Unexpected end-of-input{where_}"))
    }

    fn unclosed(&self, container: &str, opened_at: usize) -> JsonError {
        let (line, column) = self.place_of(opened_at);
        self.ended(&format!(
            ": expected close marker for {container} (start marker at {})",
            place(self.text, line, column)
        ))
    }

    fn odd_value(&mut self) -> JsonError {
        let word: String = self.text[self.at..]
            .chars()
            .take_while(|found| found.is_alphanumeric() || *found == '_')
            .collect();
        if word.is_empty() || word.starts_with(|found: char| found.is_ascii_digit()) {
            return self.unexpected(&format!("expected a valid value {VALUES}"));
        }
        self.at += word.len();
        self.error(JsonErrorKind::Syntax, format!("Unrecognized token '{word}': was expecting {VALUES}"))
    }

    fn value(&mut self) -> Parsed<Value> {
        match self.peek() {
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::array),
            Some(b'"') => {
                Ok(Value::String(self.string(": was expecting closing quote for a string value")?.into()))
            }
            Some(b'-' | b'0'..=b'9') => Ok(Value::Number(self.number()?)),
            Some(_) => self.word(),
            None => Err(self.ended("")),
        }
    }

    fn nested(&mut self, container: fn(&mut Self) -> Parsed<Value>) -> Parsed<Value> {
        if self.depth == DEPTH_MAX {
            let message = format!(
                "Document nesting depth ({}) exceeds the maximum allowed ({DEPTH_MAX})",
                DEPTH_MAX + 1
            );
            return Err(self.error(JsonErrorKind::TooDeep, message));
        }
        self.depth += 1;
        let value = container(self);
        self.depth -= 1;
        value
    }

    fn word(&mut self) -> Parsed<Value> {
        for (word, value) in
            [("null", Value::Null), ("true", Value::Bool(true)), ("false", Value::Bool(false))]
        {
            if let Some(rest) = self.text[self.at..].strip_prefix(word)
                && !rest.starts_with(|found: char| found.is_alphanumeric() || found == '_')
            {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.odd_value())
    }

    fn object(&mut self) -> Parsed<Value> {
        let opened_at = self.at;
        self.at += 1;
        let mut map = Map::new();
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Object(Arc::new(map)));
        }
        loop {
            self.skip_space();
            match self.peek() {
                Some(b'"') => {}
                Some(_) => return Err(self.unexpected("was expecting double-quote to start field name")),
                None if map.is_empty() => return Err(self.unclosed("Object", opened_at)),
                None => return Err(self.ended(" within/between Object entries")),
            }
            let key = self.string(" in field name")?;
            if self.refuse_duplicates && map.contains_key(&key) {
                return Err(self.error(JsonErrorKind::DuplicateField, format!("Duplicate field '{key}'")));
            }
            self.skip_space();
            match self.peek() {
                Some(b':') => self.at += 1,
                Some(_) => {
                    return Err(self.unexpected("was expecting a colon to separate field name and value"));
                }
                None => return Err(self.ended(" within/between Object entries")),
            }
            self.skip_space();
            if self.peek().is_none() {
                return Err(self.ended(" within/between Object entries"));
            }
            let value = self.value()?;
            map.insert(key, value);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Object(Arc::new(map)));
                }
                Some(_) => return Err(self.unexpected("was expecting comma to separate Object entries")),
                None => return Err(self.unclosed("Object", opened_at)),
            }
        }
    }

    fn array(&mut self) -> Parsed<Value> {
        let opened_at = self.at;
        self.at += 1;
        let mut items = Vec::new();
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Array(Arc::new(items)));
        }
        loop {
            self.skip_space();
            if self.peek().is_none() {
                return Err(match items.is_empty() {
                    true => self.unclosed("Array", opened_at),
                    false => self.ended(" within/between Array entries"),
                });
            }
            items.push(self.value()?);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::Array(Arc::new(items)));
                }
                Some(_) => return Err(self.unexpected("was expecting comma to separate Array entries")),
                None => return Err(self.unclosed("Array", opened_at)),
            }
        }
    }

    /// `unclosed` is the message if the input ends within the string.
    fn string(&mut self, unclosed: &str) -> Parsed<String> {
        self.at += 1;
        let mut text = String::new();
        let mut plain_from = self.at;
        loop {
            match self.peek() {
                Some(b'"') => {
                    text.push_str(&self.text[plain_from..self.at]);
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => {
                    text.push_str(&self.text[plain_from..self.at]);
                    self.at += 1;
                    text.push(self.escaped()?);
                    plain_from = self.at;
                }
                Some(control @ 0..=0x1f) => {
                    self.at += 1;
                    let message = format!(
                        "Illegal unquoted character ((CTRL-CHAR, code {control})): has to be escaped using backslash to be included in string value"
                    );
                    return Err(self.error(JsonErrorKind::Syntax, message));
                }
                Some(_) => self.at += 1,
                None => return Err(self.ended(unclosed)),
            }
        }
    }

    fn escaped(&mut self) -> Parsed<char> {
        let Some(letter) = self.text[self.at..].chars().next() else {
            return Err(self.ended(" in character escape sequence"));
        };
        self.at += letter.len_utf8();
        Ok(match letter {
            '"' | '\\' | '/' => letter,
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'u' => return self.unicode_escape(),
            _ => {
                let message = format!("Unrecognized character escape {}", name_of(letter));
                return Err(self.error(JsonErrorKind::Syntax, message));
            }
        })
    }

    /// The character of `\uXXXX`, or of a surrogate pair; an unpaired surrogate becomes the replacement character.
    fn unicode_escape(&mut self) -> Parsed<char> {
        let first = self.hex4()?;
        if (0xD800..0xDC00).contains(&first) && self.text[self.at..].starts_with("\\u") {
            let back = self.at;
            self.at += 2;
            let second = self.hex4()?;
            if (0xDC00..0xE000).contains(&second) {
                let code = 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
                return Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            self.at = back;
        }
        Ok(char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn hex4(&mut self) -> Parsed<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let Some(letter) = self.text[self.at..].chars().next() else {
                return Err(self.ended(" in character escape sequence"));
            };
            let Some(digit) = letter.to_digit(16) else {
                return Err(self.unexpected("expected a hex-digit for character escape sequence"));
            };
            self.at += 1;
            code = code * 16 + digit;
        }
        Ok(code)
    }

    fn number(&mut self) -> Parsed<Number> {
        let from = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
            if !matches!(self.peek(), Some(b'0'..=b'9')) {
                return Err(
                    self.unexpected("expected digit (0-9) to follow minus sign, for valid numeric value")
                );
            }
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
            if matches!(self.peek(), Some(b'0'..=b'9')) {
                return Err(self.error(
                    JsonErrorKind::Syntax,
                    "Invalid numeric value: Leading zeroes not allowed".to_owned(),
                ));
            }
        }
        self.digits();
        let mut whole = true;
        if self.peek() == Some(b'.') {
            whole = false;
            self.at += 1;
            if self.digits() == 0 {
                return Err(self.unexpected("Decimal point not followed by a digit"));
            }
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            whole = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            if self.digits() == 0 {
                return Err(self.unexpected("Exponent indicator not followed by a digit"));
            }
        }
        let text = &self.text[from..self.at];
        if text.len() > NUMBER_CHARS_MAX {
            let message = format!(
                "Number value length ({}) exceeds the maximum allowed ({NUMBER_CHARS_MAX})",
                text.len()
            );
            return Err(self.error(JsonErrorKind::TooLarge, message));
        }
        if whole {
            return Ok(text.parse().map_or_else(|_| Number::Big(text.into()), Number::Int));
        }
        match text.parse::<f64>() {
            Ok(double) if double.is_finite() => Ok(Number::Float(double)),
            _ => {
                Err(self
                    .error(JsonErrorKind::TooLarge, format!("Numeric value ({text}) out of range of double")))
            }
        }
    }

    fn digits(&mut self) -> usize {
        let from = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - from
    }
}

/// Jackson's name of a character.
fn name_of(found: char) -> String {
    let code = u32::from(found);
    if found.is_control() {
        return format!("(CTRL-CHAR, code {code})");
    }
    if code > 255 {
        format!("'{found}' (code {code} / 0x{code:x})")
    } else {
        format!("'{found}' (code {code})")
    }
}

#[cfg(test)]
mod tests;
