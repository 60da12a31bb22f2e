//! Sets of completion indexes, as `status.completedIndexes` writes them: `0-3,5`.

use std::collections::BTreeSet;

pub(super) fn parse(text: &str, below: i32) -> BTreeSet<i32> {
    let mut set = BTreeSet::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<i32>(), last.parse::<i32>()) {
            set.extend(first.max(0)..=last.min(below - 1));
        }
    }
    set
}

pub(super) fn text(set: &BTreeSet<i32>) -> String {
    let mut ranges: Vec<(i32, i32)> = Vec::new();
    for index in set {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *index => *last = *index,
            _ => ranges.push((*index, *index)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn as_upstream_writes_them() {
        let set = BTreeSet::from([0, 1, 2, 3, 5, 7, 8]);
        assert_eq!(text(&set), "0-3,5,7,8");
        assert_eq!(parse("0-3,5,7,8", 6), BTreeSet::from([0, 1, 2, 3, 5]), "those past the end do not count");
        assert_eq!(parse("", 3), BTreeSet::new());
    }

    proptest! {
        #[test]
        fn come_back(set in prop::collection::btree_set(0..60, 0..40)) {
            prop_assert_eq!(parse(&text(&set), 60), set);
        }
    }
}
