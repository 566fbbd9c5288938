//! "Did you mean": the known word nearest to a misspelt one, for keys of configurations and names of compressors.

use strsim::osa_distance;

/// Longest text compared: a key that is longer is no typo of ours, and the distance is quadratic.
const MAX_TEXT: usize = 64;

/// Most edits between a typo and what was meant, however long the words are.
const MOST_EDITS: usize = 4;

/// The known word with the least edit distance, when that is small for the word's length.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    if word.chars().count() > MAX_TEXT {
        return None;
    }
    let best = known.iter().map(|k| (osa_distance(word, k), *k)).min_by_key(|(d, _)| *d)?;
    let likely = best.0 <= (1 + best.1.len() / 3).min(MOST_EDITS) && best.0 < word.chars().count();
    likely.then_some(best.1)
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
        assert_eq!(nearest("ab", &["ba"]), Some("ba"), "a swap of neighbours counts once");
    }
}
