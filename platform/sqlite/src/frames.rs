//! The format of a write-ahead log: a header, then frames, each with a checksum over itself and all before it.

use std::io::{self, Read};

pub(crate) const HEADER_BYTES: usize = 32;
const FRAME_HEADER_BYTES: usize = 24;
/// The lowest bit gives the byte order in which the words of a checksum are read.
const MAGIC: u32 = 0x377f_0682;
/// SQLite's largest page.
const PAGE_BYTES_MAX: u32 = 65_536;

/// The salts that distinguish a log from an earlier one in the same file.
pub(crate) type Salts = [u8; 8];

/// An intact header.
pub(crate) struct Header {
    pub(crate) salts: Salts,
    page_bytes: usize,
    big_endian: bool,
    checksum: (u32, u32),
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// SQLite's checksum; `bytes` are a multiple of eight.
pub(crate) fn checksum((mut one, mut two): (u32, u32), bytes: &[u8], big_endian: bool) -> (u32, u32) {
    for pair in bytes.chunks_exact(8) {
        let words = if big_endian {
            (word(pair, 0), word(pair, 4))
        } else {
            (word(pair, 0).swap_bytes(), word(pair, 4).swap_bytes())
        };
        one = one.wrapping_add(words.0).wrapping_add(two);
        two = two.wrapping_add(words.1).wrapping_add(one);
    }
    (one, two)
}

/// The salts in a header, intact or not.
pub(crate) fn salts(header: &[u8; HEADER_BYTES]) -> Salts {
    let mut salts = [0; 8];
    salts.copy_from_slice(&header[16..24]);
    salts
}

impl Header {
    /// `None` if it is not a header, or is damaged. SQLite then treats the log as empty.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let (magic, page_bytes) = (word(bytes, 0), word(bytes, 8));
        let big_endian = magic & 1 == 1;
        let checksum = checksum((0, 0), &bytes[..24], big_endian);
        let whole = magic & !1 == MAGIC
            && (512..=PAGE_BYTES_MAX).contains(&page_bytes)
            && checksum == (word(bytes, 24), word(bytes, 28));
        let page_bytes = usize::try_from(page_bytes).ok()?;
        whole.then(|| Self { salts: salts(bytes), page_bytes, big_endian, checksum })
    }

    /// Reads frames, from the first, until one is damaged or `most` are read; returns the number of intact ones.
    pub(crate) fn intact_frames(&self, mut log: impl Read, most: u64) -> io::Result<u64> {
        let mut frame = vec![0; FRAME_HEADER_BYTES + self.page_bytes];
        let mut running = self.checksum;
        for whole in 0..most {
            match log.read_exact(&mut frame) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(whole),
                Err(error) => return Err(error),
            }
            running = checksum(running, &frame[..8], self.big_endian);
            running = checksum(running, &frame[FRAME_HEADER_BYTES..], self.big_endian);
            if frame[8..16] != self.salts || running != (word(&frame, 16), word(&frame, 20)) {
                return Ok(whole);
            }
        }
        Ok(most)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const PAGE_BYTES: usize = 512;
    pub(crate) const FRAME_BYTES: usize = FRAME_HEADER_BYTES + PAGE_BYTES;

    /// A log as SQLite writes it, each page filled with one byte.
    pub(crate) fn log(salts: Salts, pages: &[u8], big_endian: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let page_bytes = u32::try_from(PAGE_BYTES).unwrap();
        for number in [MAGIC | u32::from(big_endian), 3_007_000, page_bytes, 0] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(salts);
        let mut running = checksum((0, 0), &bytes, big_endian);
        let sum = |running: (u32, u32)| [running.0.to_be_bytes(), running.1.to_be_bytes()].concat();
        bytes.extend(sum(running));
        for page in pages {
            let head = [1_u32.to_be_bytes(), 1_u32.to_be_bytes()].concat();
            let content = vec![*page; PAGE_BYTES];
            running = checksum(checksum(running, &head, big_endian), &content, big_endian);
            for part in [&head[..], &salts, &sum(running), &content] {
                bytes.extend(part);
            }
        }
        bytes
    }

    fn whole(bytes: &[u8], most: u64) -> Option<u64> {
        let (head, frames) = bytes.split_first_chunk().unwrap();
        Header::parse(head).map(|header| header.intact_frames(frames, most).unwrap())
    }

    #[test]
    fn frames_are_whole_up_to_the_first_that_is_not() {
        for big_endian in [false, true] {
            let bytes = log(*b"saltsalt", &[1, 2, 3, 4], big_endian);
            assert_eq!((whole(&bytes, 4), whole(&bytes, 2), whole(&bytes, 9)), (Some(4), Some(2), Some(4)));
            assert_eq!(whole(&bytes[..bytes.len() - 1], 9), Some(3), "cut off");
            for (frame, offset) in [(1, 0), (1, 5), (1, 9), (1, 17), (1, 24), (1, FRAME_BYTES - 1), (3, 100)]
            {
                let mut bytes = bytes.clone();
                bytes[HEADER_BYTES + frame * FRAME_BYTES + offset] ^= 1;
                assert_eq!(whole(&bytes, 9), Some(frame as u64), "byte {offset} of frame {frame}");
            }
            for at in 0..HEADER_BYTES {
                let mut bytes = bytes.clone();
                bytes[at] ^= 0x10;
                assert_eq!(whole(&bytes, 9), None, "byte {at} of the header");
            }
        }
    }
}
