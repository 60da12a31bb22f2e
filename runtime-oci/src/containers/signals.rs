//! The signals that stop containers, by name or number; pure. (The names are those of `github.com/moby/sys/signal`,
//! which parses them for Docker and containerd.)

const SIGTERM: u32 = 15;
/// The first and the last real-time signal of the C libraries; those below are for the libraries themselves.
const REAL_TIME: (u32, u32) = (34, 64);
/// The other signals of Linux, without the prefix `SIG`.
const NAMES: [(&str, u32); 34] = [
    ("ABRT", 6),
    ("ALRM", 14),
    ("BUS", 7),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("FPE", 8),
    ("HUP", 1),
    ("ILL", 4),
    ("INT", 2),
    ("IO", 29),
    ("IOT", 6),
    ("KILL", 9),
    ("PIPE", 13),
    ("POLL", 29),
    ("PROF", 27),
    ("PWR", 30),
    ("QUIT", 3),
    ("SEGV", 11),
    ("STKFLT", 16),
    ("STOP", 19),
    ("SYS", 31),
    ("TERM", 15),
    ("TRAP", 5),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("USR1", 10),
    ("USR2", 12),
    ("VTALRM", 26),
    ("WINCH", 28),
    ("XCPU", 24),
    ("XFSZ", 25),
];

/// The signal that stops a container: the pod's, else the image's, else SIGTERM. A name that is none is ignored.
pub(super) fn stop_signal(of_pod: Option<&str>, of_image: Option<&str>) -> u32 {
    of_pod.or(of_image).and_then(number).unwrap_or(SIGTERM)
}

/// The number of a signal: of `SIGQUIT`, `quit`, `3`, `SIGRTMIN+3` or `RTMAX-1`.
fn number(text: &str) -> Option<u32> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let (first, last) = REAL_TIME;
    let offset = |text: &str, sign: char| match text {
        "" => Some(0),
        text => text.strip_prefix(sign)?.parse::<u32>().ok(),
    };
    let number = if let Some(more) = name.strip_prefix("RTMIN") {
        first.checked_add(offset(more, '+')?)
    } else if let Some(less) = name.strip_prefix("RTMAX") {
        last.checked_sub(offset(less, '-')?)
    } else {
        let by_name = NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
        by_name.or_else(|| text.parse().ok())
    };
    number.filter(|number| (1..=last).contains(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, expected) in [
            ("SIGQUIT", Some(3)),
            ("QUIT", Some(3)),
            ("sigwinch", Some(28)),
            ("9", Some(9)),
            // The stop signal of images that run systemd.
            ("SIGRTMIN+3", Some(37)),
            ("RTMIN", Some(34)),
            ("SIGRTMAX-1", Some(63)),
            ("37", Some(37)),
            ("SIGRTMIN+31", None),
            ("SIGRTMAX-64", None),
            ("RTMIN3", None),
            ("0", None),
            ("65", None),
            ("SIGNONE", None),
            ("", None),
        ] {
            assert_eq!(number(text), expected, "{text}");
        }
    }

    #[test]
    fn the_pods_signal_is_stronger_than_the_images() {
        assert_eq!(stop_signal(Some("SIGUSR1"), Some("SIGINT")), 10);
        assert_eq!(stop_signal(None, Some("SIGABRT")), 6);
        assert_eq!(stop_signal(None, Some("")), SIGTERM);
        assert_eq!(stop_signal(None, None), SIGTERM);
    }
}
