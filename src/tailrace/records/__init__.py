"""What is kept for people, in a relational database: keys, and a row for each request. Nothing here is in the path of a
token: a database that is slow or away delays no stream."""
