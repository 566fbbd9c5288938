//! "Did you mean": the known word nearest to a misspelt one, for keys of configurations and names of compressors.

/// Longest text compared: a key that is longer is no typo of ours, and the distance is quadratic.
const MAX_TEXT: usize = 64;

/// Most edits between a typo and what was meant, however long the words are.
const MOST_EDITS: usize = 4;

/// The known word with the least edit distance, when that is small for the word's length.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    if word.chars().count() > MAX_TEXT {
        return None;
    }
    let best = known.iter().map(|k| (distance(word, k), *k)).min_by_key(|(d, _)| *d)?;
    let likely = best.0 <= (1 + best.1.len() / 3).min(MOST_EDITS) && best.0 < word.chars().count();
    likely.then_some(best.1)
}

/// Levenshtein distance in which a swap of neighbours counts once.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let change = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = change.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_typos_and_leaves_the_rest() {
        let known = ["controller", "token", "token_file", "listen"];
        assert_eq!(nearest("contoller", &known), Some("controller"));
        assert_eq!(nearest("contorller", &known), Some("controller"));
        assert_eq!(nearest("tokenfile", &known), Some("token_file"));
        assert_eq!(nearest("zebra_crossing", &known), None);
        assert_eq!((nearest("z", &["k"]), nearest("kk", &["k"])), (None, Some("k")), "another letter is no typo");
        assert_eq!(nearest("byteps_compressor_seeds", &["byteps_dithering_normalize"]), None);
        assert_eq!(nearest(&"x".repeat(1000), &known), None);
        assert_eq!((distance("ab", "ba"), distance("", "abc"), distance("kitten", "sitting")), (1, 3, 3));
    }
}
