"""``smlp serve``: OpenAI's completions endpoint for a trained model.

engine              writes the texts of all requests, in one thread
completion_request  what a client asks for, checked
app                 the endpoints
page.html           a page to try the model
"""
