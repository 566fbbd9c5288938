//! What is reported in order although some of it is known only later: times of steps that a GPU has yet to finish.

use std::collections::VecDeque;

/// A queue whose front waits for what is missing, and all behind it with it.
#[derive(Debug)]
pub struct Deferred<T> {
    waiting: VecDeque<(Option<u64>, T)>,
}

impl<T> Default for Deferred<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new() }
    }
}

impl<T> Deferred<T> {
    /// Takes in what is whole, or what `ticket` will make whole. Tickets are never used twice.
    pub fn push(&mut self, ticket: Option<u64>, item: T) {
        self.waiting.push_back((ticket, item));
    }

    /// What was missing is known. Answers whether anything waited for it.
    pub fn resolve(&mut self, ticket: u64, complete: impl FnOnce(&mut T)) -> bool {
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

    fn drain(deferred: &mut Deferred<String>) -> Vec<String> {
        std::iter::from_fn(|| deferred.pop()).collect()
    }

    #[test]
    fn the_order_is_that_of_pushing_whenever_the_rest_is_known() {
        let mut deferred = Deferred::default();
        deferred.push(None, "a".to_owned());
        assert_eq!(drain(&mut deferred), ["a"]);
        deferred.push(Some(1), "b".to_owned());
        deferred.push(None, "c".to_owned());
        deferred.push(Some(2), "d".to_owned());
        deferred.push(Some(3), "e".to_owned());
        deferred.push(None, "f".to_owned());
        // Known out of order: it waits for the one before it.
        assert!(deferred.resolve(2, |item| item.push('2')));
        assert_eq!(drain(&mut deferred), [""; 0]);
        assert!(deferred.resolve(1, |item| item.push('1')));
        assert_eq!(drain(&mut deferred), ["b1", "c", "d2"]);
        // Nothing waits for these.
        assert!(!deferred.resolve(1, |item| item.push('9')) && !deferred.resolve(7, |item| item.push('9')));
        deferred.forget(3);
        assert_eq!(drain(&mut deferred), ["f"]);
    }

    #[test]
    fn what_is_never_known_delays_nothing() {
        let mut deferred = Deferred::default();
        for (ticket, item) in [(Some(1), "a"), (None, "b"), (Some(2), "c"), (None, "d")] {
            deferred.push(ticket, item.to_owned());
        }
        deferred.forget_all();
        assert_eq!(drain(&mut deferred), ["b", "d"]);
    }
}
