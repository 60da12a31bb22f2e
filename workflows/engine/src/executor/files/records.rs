//! Items out of bytes that come bit by bit: JSON, JSON lines, CSV; compressed or not.

use std::io::Write as _;
use std::sync::Arc;

use flate2::write::MultiGzDecoder;
use mayfly_workflows_language::definition::ItemReader;
use mayfly_workflows_language::value::Value;

use super::csv::{BYTE_ORDER_MARK, CsvRows, each_once};
use super::{at_pointer, items_in};

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Compressed bytes that are unpacked at a time: they become a thousand times as many at most.
const PACKED_BYTES: usize = 4096;

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
    form: RecordForm<'a>,
    /// The bytes of an incomplete item: a file or a line.
    held: Vec<u8>,
}

/// A [`RecordFormat`] with its reader.
enum RecordForm<'a> {
    Json { pointer: Option<Arc<str>> },
    Value,
    Lines,
    Csv(Box<CsvRows<'a>>),
}

impl<'a> Records<'a> {
    pub(super) fn new(key: &'a str, format: RecordFormat) -> Self {
        let form = match format {
            RecordFormat::Json { pointer } => RecordForm::Json { pointer },
            RecordFormat::Value => RecordForm::Value,
            RecordFormat::Lines => RecordForm::Lines,
            RecordFormat::Csv { delimiter, headers } => {
                RecordForm::Csv(Box::new(CsvRows::new(key, delimiter, headers)))
            }
        };
        Self { key, form, held: Vec::new() }
    }

    pub(super) fn push(&mut self, bytes: &[u8], items: &mut Vec<Value>) -> Result<(), String> {
        match &mut self.form {
            RecordForm::Json { .. } | RecordForm::Value => self.held.extend_from_slice(bytes),
            RecordForm::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.held.extend_from_slice(part);
                    if part.ends_with(b"\n") {
                        self.line_ends(items)?;
                    }
                }
            }
            RecordForm::Csv(rows) => rows.push(bytes, items)?,
        }
        Ok(())
    }

    /// There is no more.
    pub(super) fn end(mut self, items: &mut Vec<Value>) -> Result<(), String> {
        match std::mem::replace(&mut self.form, RecordForm::Value) {
            RecordForm::Json { pointer } => {
                let held = self.text()?;
                let mut value = self.parsed(&held, "JSON")?;
                if let Some(pointer) = pointer {
                    value = at_pointer(&value, &pointer)
                        .ok_or_else(|| format!("ItemsPointer {pointer} points to nothing in {}", self.key))?;
                }
                items.extend(items_in(&value).ok_or("Attempting to map over non-iterable node.")?);
            }
            RecordForm::Value => {
                let held = self.text()?;
                items.push(self.parsed(&held, "JSON")?);
            }
            RecordForm::Lines => self.line_ends(items)?,
            RecordForm::Csv(rows) => rows.end(items)?,
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
        assert_eq!(csv(b',', b"\xef\xbb\xbf\"a\"\r\n\r\n\"1\"").expect("rows"), [r#"{"a":"1"}"#]);
        let long = "x".repeat(5_000);
        let items = csv(b',', format!("a\n\"{long}\"\n").as_bytes()).expect("rows");
        assert_eq!(items, [format!(r#"{{"a":"{long}"}}"#)]);
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
            (csv_of(b"\xef\xbb"), "not UTF-8 text in line 1"),
            (csv_of(b"a,b\n1,2\n\"3,4\n5,6\n"), "begins in line 3"),
            (csv_of(b"a,b\r\n\r\n\"x\ny\",\"3"), "begins in line 4"),
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
