//! What is reported in order although some of it is known late: times of steps that a GPU has yet to tell.

use std::collections::VecDeque;

/// A queue whose front waits for what is missing, and all behind it with it.
#[derive(Debug)]
pub struct Late<T> {
    waiting: VecDeque<(Option<u64>, T)>,
}

impl<T> Default for Late<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new() }
    }
}

impl<T> Late<T> {
    /// Takes in what is whole, or what `ticket` will make whole. Tickets are never used twice.
    pub fn push(&mut self, ticket: Option<u64>, item: T) {
        self.waiting.push_back((ticket, item));
    }

    /// What was missing is known. Answers whether anything waited for it.
    pub fn tell(&mut self, ticket: u64, complete: impl FnOnce(&mut T)) -> bool {
        let Some((missing, item)) = self.waiting.iter_mut().find(|(missing, _)| *missing == Some(ticket)) else {
            return false;
        };
        complete(item);
        *missing = None;
        true
    }

    /// What is missing will never be known: its item goes.
    pub fn forget(&mut self, ticket: u64) {
        self.waiting.retain(|(missing, _)| *missing != Some(ticket));
    }

    /// Nothing that is missing will ever be known.
    pub fn forget_all(&mut self) {
        self.waiting.retain(|(missing, _)| missing.is_none());
    }

    /// The next item, when it is whole.
    pub fn pop(&mut self) -> Option<T> {
        self.waiting.pop_front_if(|(missing, _)| missing.is_none()).map(|(_, item)| item)
    }

    /// All that wait, in order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.waiting.iter_mut().map(|(_, item)| item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(late: &mut Late<String>) -> Vec<String> {
        std::iter::from_fn(|| late.pop()).collect()
    }

    #[test]
    fn the_order_is_that_of_pushing_whenever_the_rest_is_known() {
        let mut late = Late::default();
        late.push(None, "a".to_owned());
        assert_eq!(drain(&mut late), ["a"]);
        late.push(Some(1), "b".to_owned());
        late.push(None, "c".to_owned());
        late.push(Some(2), "d".to_owned());
        late.push(Some(3), "e".to_owned());
        late.push(None, "f".to_owned());
        // Known out of order: the one before it holds it back.
        assert!(late.tell(2, |item| item.push('2')));
        assert_eq!(drain(&mut late), [""; 0]);
        assert!(late.tell(1, |item| item.push('1')));
        assert_eq!(drain(&mut late), ["b1", "c", "d2"]);
        // Nobody waits for these.
        assert!(!late.tell(1, |item| item.push('9')) && !late.tell(7, |item| item.push('9')));
        late.forget(3);
        assert_eq!(drain(&mut late), ["f"]);
    }

    #[test]
    fn what_is_never_known_holds_nobody_back() {
        let mut late = Late::default();
        for (ticket, item) in [(Some(1), "a"), (None, "b"), (Some(2), "c"), (None, "d")] {
            late.push(ticket, item.to_owned());
        }
        late.forget_all();
        assert_eq!(drain(&mut late), ["b", "d"]);
    }
}
