//! The links between the GPUs of a node, in the terms of `nvidia-smi topo -m`.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The best path between two GPUs, from the slowest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum GpuLink {
    /// Between NUMA nodes.
    Sys,
    /// Between the PCIe host bridges of one NUMA node.
    Node,
    /// Over one host bridge.
    Phb,
    /// Over several PCIe switches.
    Pxb,
    /// Over one PCIe switch.
    Pix,
    /// Over this number of NVLinks, directly or by switches.
    NvLink(u32),
}

/// The links of each GPU to the other ones, by the GPUs' positions in the driver's list.
pub type LinkMatrix = BTreeMap<u32, BTreeMap<u32, GpuLink>>;

/// The reason why a matrix of links cannot be read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LinkMatrixError {
    #[error("the first line has no columns GPU0, GPU1, …: expected the output of `nvidia-smi topo -m`")]
    NoHeader,
    #[error("GPU{0} has no line")]
    NoLine(u32),
    #[error("the link of GPU{0} to GPU{1} is missing")]
    NoLink(u32, u32),
    #[error("the link of GPU{0} to GPU{1} is {2:?}: expected X, SYS, NODE, PHB, PXB, PIX or NV1, NV2, …")]
    Unknown(u32, u32, String),
    #[error("the link of GPU{0} to GPU{1} differs from that of GPU{1} to GPU{0}")]
    Asymmetric(u32, u32),
}

impl fmt::Display for GpuLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sys => f.write_str("SYS"),
            Self::Node => f.write_str("NODE"),
            Self::Phb => f.write_str("PHB"),
            Self::Pxb => f.write_str("PXB"),
            Self::Pix => f.write_str("PIX"),
            Self::NvLink(count) => write!(f, "NV{count}"),
        }
    }
}

impl FromStr for GpuLink {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // The second is the name in old versions of nvidia-smi.
            "SYS" | "SOC" => Ok(Self::Sys),
            "NODE" => Ok(Self::Node),
            "PHB" => Ok(Self::Phb),
            "PXB" => Ok(Self::Pxb),
            "PIX" => Ok(Self::Pix),
            _ => {
                let count = text.strip_prefix("NV").and_then(|count| count.parse().ok());
                let count = count.filter(|count| *count > 0);
                count.map(Self::NvLink).ok_or_else(|| format!("{text:?} is not a link of GPUs"))
            }
        }
    }
}

impl TryFrom<String> for GpuLink {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<GpuLink> for String {
    fn from(link: GpuLink) -> Self {
        link.to_string()
    }
}

/// Reads the output of `nvidia-smi topo -m`. Columns and lines of other devices, and the legend, are ignored.
///
/// # Errors
/// The matrix of the GPUs is incomplete, has an unknown link, or is not symmetric.
pub fn parse_matrix(text: &str) -> Result<LinkMatrix, LinkMatrixError> {
    let text = without_escapes(text);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let columns: Vec<Option<u32>> =
        lines.next().unwrap_or_default().split_whitespace().map(gpu_number).collect();
    let gpus: Vec<u32> = columns.iter().flatten().copied().collect();
    if gpus.is_empty() {
        return Err(LinkMatrixError::NoHeader);
    }
    let mut matrix = LinkMatrix::new();
    for line in lines {
        let mut fields = line.split_whitespace();
        let Some(gpu) = fields.next().and_then(gpu_number) else { continue };
        let fields: Vec<&str> = fields.collect();
        let mut links = BTreeMap::new();
        for (place, other) in columns.iter().enumerate().filter_map(|(at, of)| Some((at, (*of)?))) {
            let field = *fields.get(place).ok_or(LinkMatrixError::NoLink(gpu, other))?;
            match (gpu == other, field.parse()) {
                (true, _) if field == "X" => {}
                (false, Ok(link)) => drop(links.insert(other, link)),
                _ => return Err(LinkMatrixError::Unknown(gpu, other, field.to_owned())),
            }
        }
        matrix.insert(gpu, links);
    }
    if let Some(gpu) = gpus.iter().find(|gpu| !matrix.contains_key(gpu)) {
        return Err(LinkMatrixError::NoLine(*gpu));
    }
    for (gpu, links) in &matrix {
        for (other, link) in links {
            if matrix.get(other).and_then(|links| links.get(gpu)) != Some(link) {
                return Err(LinkMatrixError::Asymmetric(*gpu, *other));
            }
        }
    }
    Ok(matrix)
}

/// The number in `GPU7`.
fn gpu_number(text: &str) -> Option<u32> {
    text.strip_prefix("GPU")?.parse().ok()
}

/// Removes the escape sequences by which nvidia-smi underlines its first line.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        rest = rest.strip_prefix(|c: char| c.is_ascii_alphabetic()).unwrap_or(rest);
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_nvidia_smi_is_read() {
        let text = "\t\u{1b}[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n\
            GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A\n\
            GPU1\tNV18\t X \tPXB\tNODE\t0-47,96-143\t0\t\tN/A\n\
            GPU2\tSYS\tPXB\t X \tSYS\t48-95\t1\t\tN/A\n\
            NIC0\tPIX\tNODE\tSYS\t X \n\n\
            Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
        let matrix = parse_matrix(text).unwrap();
        let shown: Vec<_> = matrix
            .iter()
            .map(|(gpu, links)| {
                let links = links.iter().map(|(other, link)| format!("{other}={link}"));
                format!("{gpu}: {}", links.collect::<Vec<_>>().join(" "))
            })
            .collect();
        assert_eq!(shown, ["0: 1=NV18 2=SYS", "1: 0=NV18 2=PXB", "2: 0=SYS 1=PXB"]);
        assert_eq!(parse_matrix("GPU0 CPU Affinity\nGPU0 X N/A").unwrap(), [(0, BTreeMap::new())].into());
    }

    #[test]
    fn an_unclear_matrix_is_refused() {
        use LinkMatrixError as Error;
        for (text, expected) in [
            ("", Error::NoHeader),
            ("no such device", Error::NoHeader),
            ("GPU0 GPU1\nGPU0 X PIX", Error::NoLine(1)),
            ("GPU0 GPU1\nGPU0 X\nGPU1 PIX X", Error::NoLink(0, 1)),
            ("GPU0 GPU1\nGPU0 X FAST\nGPU1 FAST X", Error::Unknown(0, 1, "FAST".into())),
            ("GPU0 GPU1\nGPU0 X NV0\nGPU1 NV0 X", Error::Unknown(0, 1, "NV0".into())),
            ("GPU0 GPU1\nGPU0 X X\nGPU1 X X", Error::Unknown(0, 1, "X".into())),
            ("GPU0 GPU1\nGPU0 PIX PIX\nGPU1 PIX X", Error::Unknown(0, 0, "PIX".into())),
            ("GPU0 GPU1\nGPU0 X PIX\nGPU1 PHB X", Error::Asymmetric(0, 1)),
        ] {
            assert_eq!(parse_matrix(text), Err(expected), "{text:?}");
        }
    }

    #[test]
    fn links_are_ordered_by_their_speed_and_keep_their_names() {
        let names = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV18"];
        let links = names.map(|name| name.parse::<GpuLink>().unwrap());
        assert!(links.is_sorted_by(|a, b| a < b));
        let json = serde_json::to_string(&links).unwrap();
        assert_eq!(json, serde_json::to_string(&names).unwrap());
        assert_eq!(serde_json::from_str::<Vec<GpuLink>>(&json).unwrap(), links);
        assert_eq!("SOC".parse(), Ok(GpuLink::Sys));
    }
}
