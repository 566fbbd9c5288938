-- Values in each bucket of the gradient, as its trainers say them: a JSON list, empty where they do not.
ALTER TABLE jobs ADD COLUMN buckets TEXT NOT NULL DEFAULT '[]';
