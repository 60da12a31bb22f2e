//! Rows of a CSV file that arrives in parts, as items: `csv-core` finds the cells (RFC 4180), and this module names
//! them by the headers.

use std::sync::Arc;

use csv_core::{ReadFieldResult, Reader, ReaderBuilder};
use mayfly_workflows_language::value::Value;

/// The byte order mark with which some editors begin a file in UTF-8.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The bytes of a cell that are copied at a time.
const CELL_PART_BYTES: usize = 1024;

/// Reads rows.
pub(super) struct CsvRows<'a> {
    /// The file's name in messages.
    key: &'a str,
    reader: Reader,
    /// Given, or those of the first row.
    headers: Option<Vec<Arc<str>>>,
    /// The first bytes while they may be a byte order mark; afterwards those of an incomplete cell.
    held: Vec<u8>,
    is_after_mark: bool,
    row: Vec<String>,
    /// Whether a row has begun and not ended.
    in_row: bool,
    /// The line of the next byte, from 1.
    line: u64,
    /// The line in which the present cell begins.
    cell_line: u64,
}

impl<'a> CsvRows<'a> {
    pub(super) fn new(key: &'a str, delimiter: u8, headers: Option<Vec<Arc<str>>>) -> Self {
        Self {
            key,
            reader: ReaderBuilder::new().delimiter(delimiter).build(),
            headers,
            held: Vec::new(),
            is_after_mark: false,
            row: Vec::new(),
            in_row: false,
            line: 1,
            cell_line: 1,
        }
    }

    /// Reads a part of the file, and appends the complete rows to `items`.
    pub(super) fn push(&mut self, part: &[u8], items: &mut Vec<Value>) -> Result<(), String> {
        if self.is_after_mark {
            return self.cells(part, items);
        }
        self.held.extend_from_slice(part);
        if self.held.len() < BYTE_ORDER_MARK.len() && BYTE_ORDER_MARK.starts_with(&self.held) {
            return Ok(());
        }
        self.after_mark(items)
    }

    /// The end of the file: appends the last row if it has no line end.
    pub(super) fn end(mut self, items: &mut Vec<Value>) -> Result<(), String> {
        if !self.is_after_mark {
            self.after_mark(items)?;
        }
        // A line end completes a row, except inside of a quoted cell.
        let cell_line = self.cell_line;
        if self.in_row {
            self.cells(b"\n", items)?;
        }
        if self.in_row {
            return Err(format!(
                "Attempting to parse {} as CSV failed: the quoted cell that begins in line {cell_line} has no end",
                self.key
            ));
        }
        self.headers.map(drop).ok_or_else(|| "The CSV file is empty".to_owned())
    }

    fn after_mark(&mut self, items: &mut Vec<Value>) -> Result<(), String> {
        self.is_after_mark = true;
        let first = std::mem::take(&mut self.held);
        self.cells(first.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&first), items)
    }

    fn cells(&mut self, mut part: &[u8], items: &mut Vec<Value>) -> Result<(), String> {
        loop {
            if !self.in_row {
                // Empty lines, or the second half of a line end.
                let between = part.iter().take_while(|byte| b"\r\n".contains(byte)).count();
                self.line += line_ends(&part[..between]);
                self.cell_line = self.line;
                part = &part[between..];
            }
            if part.is_empty() {
                return Ok(());
            }
            self.in_row = true;
            let mut cell = [0; CELL_PART_BYTES];
            let (result, read, written) = self.reader.read_field(part, &mut cell);
            self.line += line_ends(&part[..read]);
            part = &part[read..];
            self.held.extend_from_slice(&cell[..written]);
            if let ReadFieldResult::Field { record_end } = result {
                let cell = String::from_utf8(std::mem::take(&mut self.held)).map_err(|_| {
                    format!("The file {} is not UTF-8 text in line {}", self.key, self.cell_line)
                })?;
                self.row.push(cell);
                self.cell_line = self.line;
                if record_end {
                    self.in_row = false;
                    self.row_ends(items)?;
                }
            }
        }
    }

    fn row_ends(&mut self, items: &mut Vec<Value>) -> Result<(), String> {
        let row = std::mem::take(&mut self.row);
        let Some(headers) = &self.headers else {
            self.headers = Some(each_once(row.into_iter().map(Into::into).collect())?);
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

/// Headers, if none comes twice. The sentence is LocalStack's.
pub(super) fn each_once(headers: Vec<Arc<str>>) -> Result<Vec<Arc<str>>, String> {
    match headers.iter().enumerate().any(|(at, header)| headers[..at].contains(header)) {
        true => Err("CSV headers cannot contain duplicates.".to_owned()),
        false => Ok(headers),
    }
}

fn line_ends(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}
