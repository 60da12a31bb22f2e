//! Items out of bytes that come bit by bit: JSON, JSON lines, CSV; compressed or not.

use std::io::Write as _;
use std::sync::Arc;

use flate2::write::MultiGzDecoder;
use mayfly_workflows_language::definition::ItemReader;
use mayfly_workflows_language::value::Value;

use super::{at_pointer, items_in};

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Compressed bytes that are unpacked at a time: they become a thousand times as many at most.
const PACKED_BYTES: usize = 4096;
/// The byte order mark with which some editors begin a file in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The format of a file.
#[derive(Debug, Clone)]
pub(super) enum RecordFormat {
    /// One value: a list's items, an object's members; below `pointer` where there is one.
    Json { pointer: Option<Arc<str>> },
    /// One value that is one item.
    Value,
    /// A value in every line.
    Lines,
    /// Rows; the first is the headers where none are given.
    Csv { delimiter: u8, headers: Option<Vec<Arc<str>>> },
}

impl RecordFormat {
    /// The format and settings of a reader's files.
    pub(super) fn of(reader: &ItemReader) -> Result<Self, String> {
        match reader.input_type.as_deref().unwrap_or("JSON") {
            "JSON" => Ok(Self::Json { pointer: reader.items_pointer.clone() }),
            "JSONL" => Ok(Self::Lines),
            "CSV" => Ok(Self::Csv {
                delimiter: match reader.csv_delimiter.as_deref().unwrap_or("COMMA") {
                    "PIPE" => b'|',
                    "SEMICOLON" => b';',
                    "SPACE" => b' ',
                    "TAB" => b'\t',
                    _ => b',',
                },
                headers: match reader.csv_header_location.as_deref() {
                    Some("GIVEN") => Some(each_once(reader.csv_headers.clone())?),
                    _ => None,
                },
            }),
            other => Err(format!("InputType {other} is not read here; use JSON, JSONL, CSV or MANIFEST")),
        }
    }
}

/// Headers, if none comes twice. The sentence is LocalStack's.
fn each_once(headers: Vec<Arc<str>>) -> Result<Vec<Arc<str>>, String> {
    match headers.iter().enumerate().any(|(at, header)| headers[..at].contains(header)) {
        true => Err("CSV headers cannot contain duplicates.".to_owned()),
        false => Ok(headers),
    }
}

/// Bytes as they come, unpacked where they are compressed.
#[derive(Default)]
pub(super) struct Unpacked {
    /// The first bytes, too few to detect the format.
    first: Vec<u8>,
    packed: Option<Box<MultiGzDecoder<Vec<u8>>>>,
    plain: bool,
}

impl Unpacked {
    /// Emits the records of a part.
    pub(super) fn push(
        &mut self,
        part: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        if self.plain {
            return take(part);
        }
        let Some(packed) = &mut self.packed else {
            self.first.extend_from_slice(part);
            if self.first.len() < GZIP.len() {
                return Ok(());
            }
            let first = std::mem::take(&mut self.first);
            match first.starts_with(&GZIP) {
                true => self.packed = Some(Box::new(MultiGzDecoder::new(Vec::new()))),
                false => self.plain = true,
            }
            return self.push(&first, take);
        };
        for part in part.chunks(PACKED_BYTES) {
            packed.write_all(part).map_err(|error| format!("The file cannot be unpacked: {error}"))?;
            take(packed.get_ref())?;
            packed.get_mut().clear();
        }
        Ok(())
    }

    /// The end of the file: emits what was held back.
    pub(super) fn end(
        self,
        key: &str,
        mut take: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let Some(mut packed) = self.packed else { return take(&self.first) };
        packed.try_finish().map_err(|error| format!("The file {key} cannot be unpacked: {error}"))?;
        take(packed.get_ref())
    }
}

/// Makes items.
pub(super) struct Records<'a> {
    key: &'a str,
    format: RecordFormat,
    /// The bytes of an incomplete item: a file, a line, a cell.
    held: Vec<u8>,
    row: Vec<String>,
    /// The line that is being read.
    line: u64,
    begun: bool,
    quote: Quote,
}

/// The position in a quoted cell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quote {
    Outside,
    /// Since this line.
    Inside(u64),
    /// After a quote inside: the cell's end, or the first half of a quote.
    Maybe(u64),
}

impl<'a> Records<'a> {
    pub(super) fn new(key: &'a str, format: RecordFormat) -> Self {
        Self { key, format, held: Vec::new(), row: Vec::new(), line: 1, begun: false, quote: Quote::Outside }
    }

    pub(super) fn push(&mut self, bytes: &[u8], items: &mut Vec<Value>) -> Result<(), String> {
        match self.format {
            RecordFormat::Json { .. } | RecordFormat::Value => self.held.extend_from_slice(bytes),
            RecordFormat::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.held.extend_from_slice(part);
                    if part.ends_with(b"\n") {
                        self.line_ends(items)?;
                    }
                }
            }
            RecordFormat::Csv { delimiter, .. } => {
                for byte in bytes {
                    self.csv(*byte, delimiter, items)?;
                }
            }
        }
        Ok(())
    }

    /// There is no more.
    pub(super) fn end(mut self, items: &mut Vec<Value>) -> Result<(), String> {
        match &self.format {
            RecordFormat::Json { pointer } => {
                let pointer = pointer.clone();
                let held = self.text()?;
                let mut value = self.parsed(&held, "JSON")?;
                if let Some(pointer) = pointer {
                    value = at_pointer(&value, &pointer)
                        .ok_or_else(|| format!("ItemsPointer {pointer} points to nothing in {}", self.key))?;
                }
                items.extend(items_in(&value).ok_or("Attempting to map over non-iterable node.")?);
            }
            RecordFormat::Value => {
                let held = self.text()?;
                items.push(self.parsed(&held, "JSON")?);
            }
            RecordFormat::Lines => self.line_ends(items)?,
            RecordFormat::Csv { headers, .. } => {
                let has_given = headers.is_some();
                if let Quote::Inside(line) = self.quote {
                    let key = self.key;
                    return Err(format!(
                        "Attempting to parse {key} as CSV failed: the quoted cell that begins in line {line} has no end"
                    ));
                }
                if self.begun {
                    self.row_ends(items)?;
                } else if self.line == 1 && !has_given {
                    return Err("The CSV file is empty".to_owned());
                }
            }
        }
        Ok(())
    }

    /// The held bytes as text.
    fn text(&mut self) -> Result<String, String> {
        let mut held = std::mem::take(&mut self.held);
        if held.starts_with(BYTE_ORDER_MARK) {
            held.drain(..BYTE_ORDER_MARK.len());
        }
        String::from_utf8(held).map_err(|_| format!("The file {} is not UTF-8 text", self.key))
    }

    fn parsed(&self, text: &str, kind: &str) -> Result<Value, String> {
        Value::parse(text)
            .map_err(|error| format!("Attempting to parse {} as {kind} failed: {error}", self.key))
    }

    fn line_ends(&mut self, items: &mut Vec<Value>) -> Result<(), String> {
        let line = self.text()?;
        if !line.trim().is_empty() {
            items.push(self.parsed(&line, "JSONL")?);
        }
        Ok(())
    }

    /// RFC 4180: quoted cells may hold delimiters, line ends and doubled quotes.
    fn csv(&mut self, byte: u8, delimiter: u8, items: &mut Vec<Value>) -> Result<(), String> {
        self.begun = true;
        match (self.quote, byte) {
            (Quote::Maybe(line), b'"') => {
                self.held.push(b'"');
                self.quote = Quote::Inside(line);
                return Ok(());
            }
            (Quote::Maybe(_), _) => self.quote = Quote::Outside,
            _ => {}
        }
        match (self.quote, byte) {
            (Quote::Outside, b'"') => self.quote = Quote::Inside(self.line),
            (Quote::Inside(line), b'"') => self.quote = Quote::Maybe(line),
            (Quote::Outside, b'\n') => {
                self.row_ends(items)?;
                self.line += 1;
            }
            (Quote::Outside, byte) if byte == delimiter => self.cell_ends()?,
            (_, byte) => {
                self.line += u64::from(byte == b'\n');
                self.held.push(byte);
            }
        }
        Ok(())
    }

    fn cell_ends(&mut self) -> Result<(), String> {
        let is_first = self.line == 1 && self.row.is_empty();
        let cell = match is_first {
            true => self.text()?,
            false => String::from_utf8(std::mem::take(&mut self.held))
                .map_err(|_| format!("The file {} is not UTF-8 text in line {}", self.key, self.line))?,
        };
        self.row.push(cell);
        Ok(())
    }

    fn row_ends(&mut self, items: &mut Vec<Value>) -> Result<(), String> {
        if self.held.ends_with(b"\r") {
            self.held.pop();
        }
        self.cell_ends()?;
        self.begun = false;
        let row = std::mem::take(&mut self.row);
        let RecordFormat::Csv { headers, .. } = &mut self.format else { return Ok(()) };
        let Some(headers) = headers else {
            *headers = Some(each_once(row.into_iter().map(Into::into).collect())?);
            return Ok(());
        };
        // Cells without a header are dropped, headers without a cell are empty.
        let mut cells = row.into_iter();
        let named =
            headers.iter().map(|header| (header.clone(), Value::from(cells.next().unwrap_or_default())));
        items.push(Value::object(named));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Read whole, and byte by byte.
    fn read(format: &RecordFormat, file: &[u8]) -> Result<Vec<Value>, String> {
        let in_parts = |size: usize| {
            let (mut items, mut unpacked) = (Vec::new(), Unpacked::default());
            let mut records = Records::new("f", format.clone());
            for part in file.chunks(size) {
                unpacked.push(part, |bytes| records.push(bytes, &mut items))?;
            }
            unpacked.end("f", |bytes| records.push(bytes, &mut items))?;
            records.end(&mut items).map(|()| items)
        };
        let whole = in_parts(file.len().max(1));
        assert_eq!(in_parts(1), whole);
        whole
    }

    fn csv(delimiter: u8, file: &[u8]) -> Result<Vec<String>, String> {
        let items = read(&RecordFormat::Csv { delimiter, headers: None }, file)?;
        Ok(items.into_iter().map(|item| item.to_text()).collect())
    }

    fn packed(text: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        out.write_all(text).expect("written");
        out.finish().expect("written")
    }

    #[test]
    fn rows_with_quotes() {
        let file = b"a,b\r\n\"x,\"\"y\"\"\n\",2\n";
        assert_eq!(csv(b',', file).expect("rows"), [r#"{"a":"x,\"y\"\n","b":"2"}"#]);
        assert_eq!(csv(b'|', b"\xef\xbb\xbfa|b\n1|").expect("rows"), [r#"{"a":"1","b":""}"#]);
        assert_eq!(
            csv(b',', b"a,b\n1\n1,2,3\n").expect("rows"),
            [r#"{"a":"1","b":""}"#, r#"{"a":"1","b":"2"}"#]
        );
        assert_eq!(csv(b',', b"a,b\n").expect("rows"), Vec::<String>::new());
        let given = RecordFormat::Csv { delimiter: b',', headers: Some(vec!["h".into()]) };
        assert_eq!(read(&given, b"").expect("none"), Vec::<Value>::new());
        assert_eq!(read(&given, "ä\n".as_bytes()).expect("rows")[0].to_text(), r#"{"h":"ä"}"#);
    }

    #[test]
    fn broken_files_are_told_with_their_place() {
        let csv_of = |file: &[u8]| csv(b',', file).expect_err("broken");
        let json = RecordFormat::Json { pointer: None };
        let read_of = |format: &RecordFormat, file: &[u8]| read(format, file).expect_err("broken");
        let mut cut = packed(b"a,b\n1,2\n");
        cut.truncate(cut.len() - 6);
        for (told, words) in [
            (csv_of(b""), "is empty"),
            (csv_of(b"a,b\n1,2\n\"3,4\n5,6\n"), "begins in line 3"),
            (csv_of(b"a\n\xff\n"), "not UTF-8 text in line 2"),
            (csv_of(&cut), "cannot be unpacked"),
            (read_of(&RecordFormat::Lines, b"{\"a\":1}\n{\"a\"\n"), "as JSONL failed"),
            (read_of(&json, b"[1,"), "as JSON failed"),
            (read_of(&json, b"7"), "non-iterable"),
            (read_of(&json, b""), "as JSON failed"),
        ] {
            assert!(told.contains(words), "{words}: {told}");
        }
    }

    #[test]
    fn values_are_items() {
        let text = |items: Vec<Value>| Value::from(items).to_text();
        let lines = read(&RecordFormat::Lines, b"{\"a\":1}\n\n  \r\n[2]").expect("lines");
        assert_eq!(text(lines), r#"[{"a":1},[2]]"#);
        let members = read(&RecordFormat::Json { pointer: None }, b"{\"k\":1}").expect("members");
        assert_eq!(text(members), r#"[{"Key":"k","Value":1}]"#);
        let below = RecordFormat::Json { pointer: Some("/x".into()) };
        assert_eq!(text(read(&below, b"{\"x\":[1,2]}").expect("items")), "[1,2]");
        assert_eq!(text(read(&RecordFormat::Value, b"{\"x\":1}").expect("one")), r#"[{"x":1}]"#);
        assert_eq!(csv(b',', &packed(b"a\n1\n")).expect("rows"), [r#"{"a":"1"}"#]);
    }
}
