//! The framing, against a client that behaves like kubectl.

use super::{client::SpdyClient, *};

/// The frames of what was sent, received in pieces of `size` bytes; adjacent pieces of one stream are joined.
fn received(sent: &[u8], size: usize) -> Vec<Frame> {
    let mut codec = Codec::new().unwrap();
    let mut frames = Vec::new();
    for piece in sent.chunks(size) {
        codec.push(piece);
        while let Some(frame) = codec.next_frame().unwrap() {
            match (frames.last_mut(), frame) {
                (
                    Some(Frame::Data { stream, bytes, fin }),
                    Frame::Data { stream: same, bytes: more, fin: ends },
                ) if *stream == same && !*fin => {
                    *bytes = [&bytes[..], &more].concat().into();
                    *fin = ends;
                }
                (_, frame) => frames.push(frame),
            }
        }
    }
    frames
}

#[test]
fn streams_are_opened_in_pieces_of_any_size() {
    let mut client = SpdyClient::new();
    let headers = [("streamtype", "error"), ("port", "80"), ("requestid", "0")];
    let second = [("streamtype", "data"), ("port", "80"), ("requestid", "0")];
    let settings = [0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 9, 0, 0, 0, 7, 0, 1, 0, 0];
    let sent = [
        client.open(1, &headers),
        client.more_headers(1, &headers),
        client.open(3, &second),
        data(3, b"hello", true),
        ping(7),
        control_frame(SETTINGS, &settings),
        consumed(3, 5),
        reset(1, ResetReason::Refused),
        go_away(3),
    ]
    .concat();
    let owned = |list: &[(&str, &str)]| {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Vec<_>>()
    };
    for size in [1, 7, 4096] {
        assert_eq!(
            received(&sent, size),
            [
                Frame::Open { stream: 1, headers: owned(&headers), fin: false },
                Frame::Open { stream: 3, headers: owned(&second), fin: false },
                Frame::Data { stream: 3, bytes: Bytes::from_static(b"hello"), fin: true },
                Frame::Ping { id: 7 },
                Frame::InitialWindow { bytes: 1 << 16 },
                Frame::WindowUpdate { stream: 3, bytes: 5 },
                Frame::WindowUpdate { stream: 0, bytes: 5 },
                Frame::Reset { stream: 1 },
                Frame::GoAway,
            ]
        );
    }
}

/// Programs that write a whole file at once send it in one frame.
#[test]
fn a_frame_of_any_length_is_passed_on_as_it_comes() {
    let content: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let mut codec = Codec::new().unwrap();
    let mut joined = Vec::new();
    for piece in data(1, &content, true).chunks(10_000) {
        codec.push(piece);
        while let Some(frame) = codec.next_frame().unwrap() {
            let Frame::Data { stream: 1, bytes, fin } = frame else { panic!("{frame:?}") };
            joined.extend_from_slice(&bytes);
            assert_eq!(fin, joined.len() == content.len());
        }
        assert!(codec.received.is_empty(), "nothing waits for the rest of the frame");
    }
    assert!(joined == content);
}

#[test]
fn a_reply_can_be_read_with_the_dictionary() {
    let (mut codec, mut decoder) = (Codec::new().unwrap(), HeaderDecoder::new());
    for stream in [1_u32, 3] {
        let reply = codec.reply(stream).unwrap();
        assert_eq!((&reply[..4], &reply[8..12]), (&[0x80, 3, 0, 2][..], &stream.to_be_bytes()[..]));
        assert_eq!(decoder.decode(&reply[12..]), Ok(Vec::new()));
    }
}

#[test]
fn damage_ends_the_connection() {
    for bytes in [
        &[0x80, 2, 0, 1, 0, 0, 0, 0][..],
        &[0x80, 3, 0, 1, 0, 0, 0, 2, 0, 0],
        &[0x80, 3, 0, 9, 0, 0, 0, 4, 0, 0, 0, 1],
        &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff],
        &[0x80, 3, 0, 1, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 9, 9],
    ] {
        let mut codec = Codec::new().unwrap();
        codec.push(bytes);
        assert!(codec.next_frame().is_err(), "{bytes:?}");
    }
}

#[test]
fn only_a_clients_pings_are_answered() {
    assert!(is_of_client(1) && !is_of_client(2));
}
