//! Converts between DNS messages and the zone's types. Pure.

use std::net::IpAddr;

use simple_dns::{
    CLASS, Name, OPCODE, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE,
    rdata::{A, AAAA, CNAME, OPT, PTR, RData, SOA, SRV, TXT},
};

use super::zone::{RecordData, RecordType, TTL_SECONDS, Zone, ZoneRecord};

/// The bytes of a message's header.
const HEADER_BYTES: usize = 12;
/// The size limit of UDP answers without EDNS (RFC 1035, section 4.2.1).
const DATAGRAM_BYTES_PLAIN: u16 = 512;
/// The size limit of UDP answers with EDNS: fits into one packet on any network (DNS flag day 2020).
const DATAGRAM_BYTES_MAX: u16 = 1232;
/// The timers of the zone's SOA record, in seconds. The zone is never transferred; CoreDNS's values.
const SOA_REFRESH_SECONDS: i32 = 7200;
const SOA_RETRY_SECONDS: i32 = 1800;
const SOA_EXPIRE_SECONDS: i32 = 86_400;
/// The flag of truncated answers in the third byte of a header.
const TRUNCATED: u8 = 0x02;
/// The class of the internet.
const CLASS_IN: u16 = 1;
const CLASS_ANY: u16 = 255;

/// The question of a query, parsed independently of its records, so that its type may be unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Without the final dot. Bytes that are not valid in host names are replaced by `?`.
    pub name: String,
    pub kind: u16,
    /// The offset of the question's end in the message.
    end: usize,
}

/// A message that is not a query for one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// To be dropped: the message is an answer, or shorter than a header.
    Silent,
    /// To be answered with this message.
    Answer(Vec<u8>),
}

impl Question {
    /// Parses the question of a query.
    ///
    /// # Errors
    /// The message is not a query for exactly one name of the class `IN`.
    pub fn of(message: &[u8]) -> Result<Self, Malformed> {
        let header = message.get(..HEADER_BYTES).ok_or(Malformed::Silent)?;
        // Replying to answers could cause an endless loop.
        if header[2] & 0x80 != 0 {
            return Err(Malformed::Silent);
        }
        let refused = |code| Malformed::Answer(bare_answer(message, HEADER_BYTES, code));
        if (header[2] >> 3) & 0xf != 0 {
            return Err(refused(RCODE::NotImplemented));
        }
        if header[4..6] != [0, 1] {
            return Err(refused(RCODE::FormatError));
        }
        let (question, class) = Self::parse(message).ok_or_else(|| refused(RCODE::FormatError))?;
        match class {
            CLASS_IN | CLASS_ANY => Ok(question),
            _ => Err(Malformed::Answer(bare_answer(message, question.end, RCODE::Refused))),
        }
    }

    fn parse(message: &[u8]) -> Option<(Self, u16)> {
        let (mut name, mut at) = (String::new(), HEADER_BYTES);
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            match length {
                0 => break,
                1..=63 => {
                    if !name.is_empty() {
                        name.push('.');
                    }
                    let label = message.get(at..at + length)?;
                    let is_usual = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
                    name.extend(
                        label.iter().map(|byte| if is_usual(*byte) { char::from(*byte) } else { '?' }),
                    );
                    at += length;
                }
                // Compression pointers are invalid here: a question has no earlier names.
                _ => return None,
            }
        }
        let number = |at: usize| Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?));
        Some((Self { name, kind: number(at)?, end: at + 4 }, number(at + 2)?))
    }

    /// The type of the requested records.
    #[must_use]
    pub fn record_type(&self) -> RecordType {
        match self.kind {
            1 => RecordType::A,
            28 => RecordType::Aaaa,
            33 => RecordType::Srv,
            12 => RecordType::Ptr,
            16 => RecordType::Txt,
            6 => RecordType::Soa,
            5 => RecordType::Cname,
            255 => RecordType::Any,
            _ => RecordType::Other,
        }
    }

    /// An answer with this code and no records.
    #[must_use]
    pub fn refuse(&self, query: &[u8], code: RCODE) -> Vec<u8> {
        bare_answer(query, self.end, code)
    }
}

/// The query's header and question as an answer without records.
fn bare_answer(query: &[u8], end: usize, code: RCODE) -> Vec<u8> {
    let mut answer = query.get(..end).unwrap_or_default().to_vec();
    let questions = u8::from(end > HEADER_BYTES);
    if let Some(header) = answer.get_mut(2..HEADER_BYTES) {
        // The answer bit, the query's opcode and its "recursion desired" flag; recursion is available.
        header[0] = 0x80 | (header[0] & 0x79);
        header[1] = 0x80 | (code as u8);
        header[2..].copy_from_slice(&[0, questions, 0, 0, 0, 0, 0, 0]);
    }
    answer
}

/// An answer that is being composed.
#[derive(Debug, Default)]
pub struct ZoneReply {
    pub answers: Vec<ZoneRecord>,
    pub additionals: Vec<ZoneRecord>,
    /// Set if there are no such records; `true`: the name does not exist.
    pub negative: Option<bool>,
}

impl ZoneReply {
    /// The message, at most `limit` bytes long: records that do not fit are omitted, and the answer is marked as
    /// truncated.
    #[must_use]
    pub fn encode(&self, query: &[u8], question: &Question, zone: &Zone, limit: u16) -> Vec<u8> {
        let code = if self.negative == Some(true) { RCODE::NameError } else { RCODE::NoError };
        let packet = |answers: &[ZoneRecord], additionals: &[ZoneRecord]| {
            self.packet(query, zone, code, answers, additionals)
        };
        let fits = |packet: &Vec<u8>| packet.len() <= usize::from(limit);
        // A query that cannot be parsed has an unknown type, of which the zone has no records.
        let Some(whole) = packet(&self.answers, &self.additionals) else {
            return question.refuse(query, code);
        };
        if fits(&whole) {
            return whole;
        }
        // Additional records are optional, so they are omitted first.
        if let Some(shorter) = packet(&self.answers, &[]).filter(fits) {
            return shorter;
        }
        // Then answers are, as many as necessary: some clients use a truncated answer instead of asking over TCP. The
        // length grows with the number of answers, so the largest number that fits is found by bisection.
        let (mut fitting, mut too_many) = (0, self.answers.len());
        let mut truncated = None;
        while too_many - fitting > 1 {
            let count = fitting + (too_many - fitting) / 2;
            match packet(&self.answers[..count], &[]).filter(fits) {
                Some(shorter) => (fitting, truncated) = (count, Some(shorter)),
                None => too_many = count,
            }
        }
        let mut truncated = truncated.unwrap_or_else(|| question.refuse(query, code));
        truncated[2] |= TRUNCATED;
        truncated
    }

    fn packet(
        &self,
        query: &[u8],
        zone: &Zone,
        code: RCODE,
        answers: &[ZoneRecord],
        additionals: &[ZoneRecord],
    ) -> Option<Vec<u8>> {
        let query = Packet::parse(query).ok()?;
        let mut reply = Packet::new_reply(query.id());
        reply.set_flags(PacketFlag::AUTHORITATIVE_ANSWER | PacketFlag::RECURSION_AVAILABLE);
        if query.has_flags(PacketFlag::RECURSION_DESIRED) {
            reply.set_flags(PacketFlag::RECURSION_DESIRED);
        }
        *reply.rcode_mut() = code;
        if query.opt().is_some() {
            let own = OPT { opt_codes: Vec::new(), udp_packet_size: DATAGRAM_BYTES_MAX, version: 0 };
            *reply.opt_mut() = Some(own);
        }
        reply.questions.clone_from(&query.questions);
        let soa = zone.soa();
        let authority = ZoneRecord { name: zone.domain().to_owned(), data: RecordData::Soa };
        reply.answers = answers.iter().filter_map(|of| record(of, &soa)).collect();
        reply.additional_records = additionals.iter().filter_map(|of| record(of, &soa)).collect();
        if self.negative.is_some() {
            reply.name_servers = record(&authority, &soa).into_iter().collect();
        }
        reply.build_bytes_vec_compressed().ok()
    }
}

/// The names in the zone's SOA record.
struct SoaNames {
    server: String,
    mailbox: String,
}

impl Zone {
    fn soa(&self) -> SoaNames {
        SoaNames {
            server: format!("ns.dns.{}", self.domain()),
            mailbox: format!("hostmaster.{}", self.domain()),
        }
    }
}

/// Converts a record; `None` if it contains an invalid name.
fn record<'a>(of: &'a ZoneRecord, soa: &'a SoaNames) -> Option<ResourceRecord<'a>> {
    let data = match &of.data {
        RecordData::Address(IpAddr::V4(address)) => RData::A(A::from(*address)),
        RecordData::Address(IpAddr::V6(address)) => RData::AAAA(AAAA::from(*address)),
        RecordData::Srv { weight, port, target } => {
            RData::SRV(SRV { priority: 0, weight: *weight, port: *port, target: Name::new(target).ok()? })
        }
        RecordData::Ptr(name) => RData::PTR(PTR(Name::new(name).ok()?)),
        RecordData::Cname(name) => RData::CNAME(CNAME(Name::new(name).ok()?)),
        RecordData::Txt(text) => RData::TXT(TXT::new().with_string(text).ok()?),
        RecordData::Soa => RData::SOA(SOA {
            mname: Name::new(&soa.server).ok()?,
            rname: Name::new(&soa.mailbox).ok()?,
            serial: 1,
            refresh: SOA_REFRESH_SECONDS,
            retry: SOA_RETRY_SECONDS,
            expire: SOA_EXPIRE_SECONDS,
            minimum: TTL_SECONDS,
        }),
    };
    Some(ResourceRecord::new(Name::new(&of.name).ok()?, CLASS::IN, TTL_SECONDS, data))
}

/// The maximum size of a UDP answer to this query, in bytes.
#[must_use]
pub fn datagram_limit(query: &[u8]) -> u16 {
    let query = Packet::parse(query).ok();
    let asked = query.as_ref().and_then(|query| query.opt()).map(|opt| opt.udp_packet_size);
    asked.unwrap_or(DATAGRAM_BYTES_PLAIN).clamp(DATAGRAM_BYTES_PLAIN, DATAGRAM_BYTES_MAX)
}

/// A query for the records of an alias's target, with the identifier and the options of the query for the alias.
#[must_use]
pub fn query_for(target: &str, question: &Question, query: &[u8]) -> Option<Vec<u8>> {
    let original = Packet::parse(query).ok()?;
    let mut packet = Packet::new_query(original.id());
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    *packet.opcode_mut() = OPCODE::StandardQuery;
    packet.opt_mut().clone_from(&original.opt().cloned());
    let kind = QTYPE::TYPE(TYPE::from(question.kind));
    let name = Name::new(target).ok()?;
    packet.questions.push(simple_dns::Question::new(name, kind, CLASS::IN.into(), false));
    packet.build_bytes_vec_compressed().ok()
}

/// The answer to a query for an alias to a name outside of the zone: the alias, and the answer of the target's name
/// servers.
#[must_use]
pub fn with_alias(query: &[u8], alias: &[ZoneRecord], forwarded: &[u8], zone: &Zone) -> Option<Vec<u8>> {
    let query = Packet::parse(query).ok()?;
    let mut reply = Packet::parse(forwarded).ok()?;
    reply.set_id(query.id());
    reply.questions = query.questions;
    let soa = zone.soa();
    let alias = alias.iter().filter_map(|of| record(of, &soa));
    let answers = std::mem::take(&mut reply.answers);
    reply.answers = alias.chain(answers).collect();
    reply.build_bytes_vec_compressed().ok()
}
